"""Traces the model: groups of equal layers, a layer's forward and backward, what remat keeps, state, the loss."""
