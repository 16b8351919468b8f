"""Adds one number to each row of an array by comparisons, on TPUs and GPUs, in place of a scatter.

The gradient of `jnp.take_along_axis(logits, labels[..., None], axis=-1)`, which cross-entropies have, is such a sum:
one number for each row of zeros. JAX's derivative scatters it. A comparison is part of the loop that computes the rest
of the gradient. And the compiler of TPUs with sparse cores (v5p, v6e) gives such a scatter to them, and then sends
nothing beside the loop that has it: each stage would wait for each activation.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode, broadcasted_iota

from jpipe.jax.inside import in_place_of, replaced
from jpipe.jax.primitives import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, shapes_of
from jpipe.jax.tracing import inside_of_calls


def row_additions_by_comparison(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Rewrites one device's jaxpr so, inside of calls and loops too; the numbers are the same.

    Only sums of two rows or more, to zeros: one number more in a large array is added in place.

    >>> import jax, jax.numpy as jnp
    >>> logits, labels = jnp.ones((2, 8)), jnp.ones((2, 1), int)
    >>> taken = lambda logits: jnp.take_along_axis(logits, labels, axis=-1).sum()
    >>> gradient = jax.make_jaxpr(jax.grad(taken))(logits)
    >>> "scatter-add" in str(gradient), "scatter-add" in str(row_additions_by_comparison(gradient))
    (True, False)
    """
    return ClosedJaxpr(_changed(closed.jaxpr), closed.consts)


def _changed(jaxpr: Jaxpr) -> Jaxpr:
    equations, zeros = list[JaxprEqn](), set[Var]()
    for equation in jaxpr.eqns:
        dim = _dim_of_rows(equation)
        dim = dim if dim is not None and equation.invars[0] in zeros else None
        equations += [inside_of_calls(equation, _changed)] if dim is None else _compares(equation, dim)
        if equation.primitive.name == "broadcast_in_dim" and _is_zero(equation.invars[0]):
            zeros.update(equation.outvars)
    return replaced(jaxpr, eqns=equations)


def _is_zero(operand: Var | Literal) -> bool:
    return isinstance(operand, Literal) and not np.shape(operand.val) and bool(operand.val == 0)


def _dim_of_rows(equation: JaxprEqn) -> int | None:
    """The dimension along which an equation adds one number to each row of an array; None if it does anything else.

    There are two rows at least. A row lies along the one dimension that indices choose from. Each other dimension goes
    along with one of the indices (it is batched), in order, or has one place only; so the number of rows is that of the
    indices, and of the numbers that are added.
    """
    if equation.primitive.name != "scatter-add":
        return None
    array, indices, updates = (shape.shape for shape in shapes_of(equation.invars))
    dims = equation.params["dimension_numbers"]
    chosen, batched = dims.scatter_dims_to_operand_dims, dims.operand_batching_dims
    if len(chosen) != 1 or chosen[0] not in dims.inserted_window_dims:
        return None
    in_order = all(tuple(sorted(each)) == tuple(each) for each in (batched, dims.scatter_indices_batching_dims))
    others = {i: size for i, size in enumerate(array) if i != chosen[0]}
    by_row = in_order and all(i in batched or size == 1 for i, size in others.items())
    rows = math.prod(others.values())
    return chosen[0] if by_row and math.prod(indices) == math.prod(updates) == rows > 1 else None


def _compares(equation: JaxprEqn, dim: int) -> list[JaxprEqn]:
    """Makes equations that add where the place along `dim` is the index; an index out of bounds adds nothing."""
    clips = equation.params["mode"] == GatherScatterMode.CLIP

    def add(array: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
        rows = (*array.shape[:dim], 1, *array.shape[dim + 1 :])
        # Narrow indices, such as bytes, might not hold the size.
        index = indices.reshape(rows).astype(indices.dtype if indices.dtype.itemsize >= 4 else jnp.int32)
        index = jnp.clip(index, 0, array.shape[dim] - 1) if clips else index
        hit = broadcasted_iota(index.dtype, array.shape, dim) == index
        return jnp.where(hit, array + updates.reshape(rows), array)

    return in_place_of(equation, add)
