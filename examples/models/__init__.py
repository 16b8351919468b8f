"""Models as lists of layers for `jpipe.Pipeline`, each with the loss that belongs to it."""
