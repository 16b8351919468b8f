"""Carries out a function of whole arrays on the parts that one device has, operation by operation.

Knows nothing of pipelines. `per_device` is its way in.
"""

from jpipe.partitioner.per_device import per_device as per_device
