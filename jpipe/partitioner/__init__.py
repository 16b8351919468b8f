"""Partitions a traced function over mesh axes, operation by operation. Knows nothing of pipelines."""
