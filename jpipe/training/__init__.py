"""Trains: the training state, one step, optimisers and `per_layer`."""
