"""Carries out a function of whole arrays on the parts that one device has, operation by operation.

It knows nothing of pipelines. `per_device.jaxpr_per_device` is its entry; `docs/partitioner.md` is its page.
"""
