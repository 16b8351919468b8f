"""Mesh axes and what they split; carries out a function of whole arrays on the parts that one device has.

Of pipelines it knows the axis `stage` and no more. `per_device.jaxpr_per_device` is its entry; `docs/partitioner.md` is
its page.
"""
