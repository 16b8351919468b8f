"""What a step does: its data, a stage's work, the loop over ticks, the jitted entry points. Knows all of these."""
