"""Puts all that a model is made of behind one interface: Flax modules, functions, skips, shared weights.

Only `flax`, `linen`, `nnx` and `adapt` know Flax.
"""
