"""Makes several processes one program: they meet, compare what they want, and end together."""
