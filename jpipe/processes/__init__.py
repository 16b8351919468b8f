"""Several processes that are one program: how they meet, and that they want the same. Knows nothing of pipelines."""
