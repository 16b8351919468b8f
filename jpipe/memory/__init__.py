"""Lays out arrays on stages: a stage's buffers, values that cross a boundary, each layer's own variables and back."""
