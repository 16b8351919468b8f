"""Generates: continues prompts token by token, in stages, with the caches of the layers.

Only `jpipe.pipeline` imports it.
"""
