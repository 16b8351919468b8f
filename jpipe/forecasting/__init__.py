"""Predicts a training step on hardware that isn't there: bytes, cycles, seconds, and the settings to choose.

It is a tool: it takes a pipeline, and no folder of the core imports it.
"""
