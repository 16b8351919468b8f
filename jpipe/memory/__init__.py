"""Lays out arrays on stages: a stage's buffers, what crosses a boundary, each layer's own variables and back."""
