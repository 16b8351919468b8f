"""Decides once, from the shapes of the first batch: costs of layers, cuts, layouts."""
