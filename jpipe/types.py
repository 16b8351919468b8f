"""Type names for pytrees, and for leaves that are arrays or only their shapes."""

from __future__ import annotations

from typing import Any, TypeAlias

PyTree: TypeAlias = Any
"""Any nesting of containers that JAX knows (dicts, lists, tuples, registered classes) with arrays as leaves."""

Leaf: TypeAlias = Any
"""An array, traced or not, or its `jax.ShapeDtypeStruct` where nothing is computed."""

Structure: TypeAlias = Any
"""The result of `jax.tree.structure`, a pytree without its leaves; type checkers don't take JAX's name for a class."""

Shapes: TypeAlias = Any
"""A pytree of `jax.ShapeDtypeStruct`."""

Batch: TypeAlias = Any
"""A batch of examples: a pytree of arrays `[B, ...]`, or of one micro-batch `[b, ...]`."""

Device: TypeAlias = Any
"""A `jax.Device`, whose class JAX shows under a name that type checkers take for a variable."""
