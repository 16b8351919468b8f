"""Schedules as plain data: which stage does which action in which tick, and how long that takes.

Files in order of their imports: actions, waiting, ticks, schedule, orders, simulate. They may import one
another in that order and NumPy; nothing else of jpipe, and no JAX (matplotlib only to plot).
"""
