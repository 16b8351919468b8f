"""Holds all that isn't public in JAX, Flax or Python, or isn't the same in every version."""
