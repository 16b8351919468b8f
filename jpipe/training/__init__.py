"""Optimisers: the training state, `per_layer`, and what may see many layers in one array. Knows `memory`."""
