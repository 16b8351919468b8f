"""Lays out arrays on stages: variables, a stage's buffers, values that cross a boundary, batches."""
