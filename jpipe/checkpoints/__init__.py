"""Saves a training state in the layers' own layout, and restores it under any pipeline of the same layers.

It may import the whole package, and orbax; no other folder imports it.
"""
