"""Where arrays lie: a stage's buffers, what crosses a boundary, each layer's own variables and back.

Knows `model` and what it knows, and `schedules.placement`.
"""
