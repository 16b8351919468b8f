"""Carries out a step: a stage's work, the loop over ticks, the programs that are jitted; continues prompts."""
