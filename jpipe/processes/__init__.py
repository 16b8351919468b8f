"""Makes several processes one program: they meet, compare their settings, and end together."""
