"""What speaks to the person at the terminal: progress of long work, warnings. Knows nothing of the rest."""
