"""Adds one number to each row of an array by comparisons, on TPUs and GPUs, in place of a scatter.

The gradient of `jnp.take_along_axis(logits, labels[..., None], axis=-1)`, which cross-entropies have, is such a sum:
one number for each row of zeros. JAX's derivative scatters it. A comparison is part of the loop that computes the rest
of the gradient. And a TPU with sparse cores (v5p, v6e) gives the scatter to them: its compiler then lets nothing be
sent beside a loop in which they work, so that all stages wait for each activation.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode, broadcasted_iota

from jpipe.jaxprs.rewriting import inside_of_calls
from jpipe.seam.inside import in_place_of, replaced
from jpipe.seam.jaxpr_types import ClosedJaxpr, Jaxpr, JaxprEqn, shapes_of


def row_additions_by_comparison(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Rewrites one device's jaxpr so, inside of calls and loops too; the numbers are the same.

    >>> import jax, jax.numpy as jnp
    >>> logits, labels = jnp.ones((2, 8)), jnp.ones((2, 1), int)
    >>> taken = lambda logits: jnp.take_along_axis(logits, labels, axis=-1).sum()
    >>> gradient = jax.make_jaxpr(jax.grad(taken))(logits)
    >>> "scatter-add" in str(gradient), "scatter-add" in str(row_additions_by_comparison(gradient))
    (True, False)
    """
    return ClosedJaxpr(_changed(closed.jaxpr), closed.consts)


def _changed(jaxpr: Jaxpr) -> Jaxpr:
    equations: list[JaxprEqn] = []
    for equation in jaxpr.eqns:
        dim = _dim_of_rows(equation)
        equations += [inside_of_calls(equation, _changed)] if dim is None else _compares(equation, dim)
    return replaced(jaxpr, eqns=equations)


def _dim_of_rows(equation: JaxprEqn) -> int | None:
    """The dimension along which an equation adds one number to each row of an array; None if it does anything else.

    Other dimensions go along with those of the indices (they are batched), in order, or have one place only.
    """
    if equation.primitive.name != "scatter-add":
        return None
    array, indices, updates = (shape.shape for shape in shapes_of(equation.invars))
    dims = equation.params["dimension_numbers"]
    batched, of_indices = list(dims.operand_batching_dims), list(dims.scatter_indices_batching_dims)
    if len(dims.scatter_dims_to_operand_dims) != 1 or batched != sorted(batched) or of_indices != sorted(of_indices):
        return None
    (dim,) = dims.scatter_dims_to_operand_dims
    one_each = math.prod(indices) == math.prod(updates) == math.prod(array[:dim] + array[dim + 1 :])
    by_row = all(i == dim or i in batched or size == 1 for i, size in enumerate(array))
    return dim if dim in dims.inserted_window_dims and one_each and by_row else None


def _compares(equation: JaxprEqn, dim: int) -> list[JaxprEqn]:
    """Makes equations that add where the place along `dim` is the index; an index out of bounds adds nothing."""
    clips = equation.params["mode"] == GatherScatterMode.CLIP

    def add(array: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
        rows = (*array.shape[:dim], 1, *array.shape[dim + 1 :])
        # Narrow indices, such as bytes, might not hold the size.
        index = indices.reshape(rows).astype(jnp.promote_types(indices.dtype, jnp.int32))
        index = jnp.clip(index, 0, array.shape[dim] - 1) if clips else index
        hit = broadcasted_iota(index.dtype, array.shape, dim) == index
        return array + jnp.where(hit, updates.reshape(rows), jnp.zeros((), updates.dtype))

    return in_place_of(equation, add)
