"""Measures what a training step's time goes into on the devices at hand, and says what would make it shorter.

It is a tool: it takes a pipeline, and no folder of the core imports it. `picture` needs matplotlib, and is imported
only to draw.
"""
