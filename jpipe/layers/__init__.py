"""What a model is made of, behind one interface: Flax modules, functions, skips, shared weights.

Only `flax` and `adapt` know Flax. Knows `jax_tools`.
"""
