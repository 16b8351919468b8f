"""Decides what a step does, as plain data: costs of layers, cuts and layouts once, a step for each batch shape."""
