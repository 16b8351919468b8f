"""Checkpoints: a training state on disk, in the layers' own layout, and back under any other.

May know the whole package, and orbax; nothing of the package knows it.
"""
