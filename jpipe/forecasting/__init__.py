"""What a training step will take on hardware that isn't there: bytes, cycles, seconds.

A tool: it takes a pipeline, and no folder imports it.
"""
