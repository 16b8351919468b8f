"""What a training step's time goes into, measured on the devices at hand, and what would make it shorter.

A tool: it takes a pipeline, and no folder imports it. Files in order of their imports: measure, device_memory;
layer_times, prediction, changes, findings; profile_tables, profile; `picture` needs matplotlib, and is imported to
draw. `communication` measures nothing: it reads what is sent from the traced program.
"""
