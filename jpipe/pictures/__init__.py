"""What people look at: pictures of schedules, traces for Perfetto, tables for notebooks.

Tools: they import the core. Methods of the core that hand over to them (`Timeline.plot`) import them when called.
Files in order of their imports: tables, summary; palette, bars, perfetto, gantt, in_flight, figures. `gantt` and
`in_flight` need matplotlib, which `figures` imports only to draw.
"""
