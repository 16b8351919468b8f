"""Carries out a step: a step as plain data, a stage's work, the loop over ticks, the programs that are jitted."""
