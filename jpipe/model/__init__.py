"""The traced model: groups of equal layers, one layer's forward and vjp, what remat keeps, state, the loss.

Knows `layers`, `mesh`, `partitioner` and `jax_tools`.
"""
