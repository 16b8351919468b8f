"""What of JAX, Flax and orbax isn't public, or isn't the same in every version.

Of jpipe it needs `terminal` and `types` alone.
"""
