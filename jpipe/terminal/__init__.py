"""Speaks to the person at the terminal: progress of long work, warnings, tables."""
