"""Makes several processes one program, and speaks to the person at the terminal: progress, warnings, tables."""
