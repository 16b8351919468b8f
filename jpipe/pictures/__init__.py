"""Draws what people look at: pictures of schedules, traces for Perfetto, a pipeline as a table.

These are tools that import the core. Methods of the core that need them (`Timeline.plot`) import them when called.
Files in order of their imports: summary; palette, perfetto, gantt, figures. `gantt` needs matplotlib,
which `figures` imports only to draw.
"""
