"""What of JAX, Flax and orbax isn't public, or isn't the same in every version. Imports nothing of jpipe."""
