"""Rewrites one device's jaxpr to what its kind of device computes faster: gradients of weights, sums of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode, broadcasted_iota

from jpipe.jax.inside import in_place_of
from jpipe.jax.primitives import ClosedJaxpr, JaxprEqn, Literal, Var, shapes_of
from jpipe.jax.tracing import changed

# --- gradients of weights, on CPUs ------------------------------------------------------------------------------------


def weight_products_as_they_lie(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Computes gradients of weights by products of operands as they lie, which takes CPUs less time.

    For y = x @ w JAX's derivative computes the gradient of w as (dy.T @ x).T, summed over all dimensions of examples at
    once. A TPU's compiler chooses layouts so that nothing is turned. XLA's for CPUs turns dy in memory, then multiplies
    two operands that both lie the wrong way. As here, over one dimension of all examples, it takes less time
    (`benchmarks/weight_products.py`), and as much memory or less.

    All products are rewritten that are summed over the first dimensions of both operands. The same numbers are
    multiplied and added up, maybe in another order.

    >>> import jax, jax.numpy as jnp
    >>> x, w, dy = jnp.ones((2, 8, 3)), jnp.ones((3, 5)), jnp.ones((2, 8, 5))
    >>> gradient = jax.make_jaxpr(lambda x, dy: jax.vjp(lambda w: x @ w, w)[1](dy))(x, dy)
    >>> [str(equation.primitive) for equation in gradient.jaxpr.eqns][-2:]
    ['dot_general', 'transpose']
    >>> [str(equation.primitive) for equation in weight_products_as_they_lie(gradient).jaxpr.eqns][-5:]
    ['reshape', 'dot_general', 'optimization_barrier', 'transpose', 'transpose']
    """
    change = lambda equation: _as_they_lie(equation) if _is_of_weights(equation) else (equation,)
    return ClosedJaxpr(changed(closed.jaxpr, change), closed.consts)


def _is_of_weights(equation: JaxprEqn) -> bool:
    """Whether an equation is a product, summed over the first dimensions of both operands, and both have others."""
    if equation.primitive.name != "dot_general":
        return False
    (first, second), (batch, _) = equation.params["dimension_numbers"]
    precision = equation.params["precision"]
    # A pair of precisions, and an algorithm that isn't one of JAX's own, says something of each operand.
    tells_apart = isinstance(precision, tuple) and len({*precision}) > 1
    rest = [len(shape.shape) - len(first) for shape in shapes_of(equation.invars)]
    leading = tuple(first) == tuple(second) == tuple(range(len(first)))
    return bool(first) and leading and not batch and all(rest) and not tells_apart


def _as_they_lie(product: JaxprEqn) -> list[JaxprEqn]:
    """Makes equations for x.T @ dy, `[examples, n]` and `[examples, m]`, or the transpose of dy.T @ x if n > m.

    With few columns on the left XLA's product is faster. Without the barrier its compiler would swap them back. Of two
    transposes, this one and that of JAX's derivative, nothing is left.
    """
    summed = len(product.params["dimension_numbers"][0][0])
    options = {name: product.params[name] for name in ("precision", "preferred_element_type")}

    def over_rows(a: jax.Array, b: jax.Array) -> jax.Array:
        rows = math.prod(a.shape[:summed])
        shape = a.shape[summed:] + b.shape[summed:]
        a, b = (x.reshape(rows, math.prod(x.shape[summed:])) for x in (a, b))  # of no elements too
        made = jax.lax.dot_general(a, b, (((0,), (0,)), ((), ())), **options)
        return jax.lax.optimization_barrier(made).reshape(shape)

    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        if math.prod(a.shape[summed:]) < math.prod(b.shape[summed:]):
            return over_rows(a, b)
        first = b.ndim - summed
        return jax.lax.transpose(made := over_rows(b, a), [*range(first, made.ndim), *range(first)])

    return in_place_of(product, multiply)


# --- sums of rows, on TPUs and GPUs -----------------------------------------------------------------------------------


def row_additions_by_comparison(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Adds one number to each row of an array of zeros by comparisons, in place of a scatter; the numbers are the same.

    The gradient of `jnp.take_along_axis(logits, labels[..., None], axis=-1)`, which cross-entropies have, is such a
    sum, and JAX's derivative scatters it. A comparison is part of the loop that computes the rest of the gradient. And
    the compiler of TPUs with sparse cores (v5p, v6e) gives such a scatter to them, and then sends nothing beside the
    loop that has it: each stage would wait for each activation.

    Only sums of two rows or more, to zeros: one number more in a large array is added in place.

    >>> import jax, jax.numpy as jnp
    >>> logits, labels = jnp.ones((2, 8)), jnp.ones((2, 1), int)
    >>> taken = lambda logits: jnp.take_along_axis(logits, labels, axis=-1).sum()
    >>> gradient = jax.make_jaxpr(jax.grad(taken))(logits)
    >>> "scatter-add" in str(gradient), "scatter-add" in str(row_additions_by_comparison(gradient))
    (True, False)
    """
    zeros = set[Var]()

    def change(equation: JaxprEqn) -> Sequence[JaxprEqn]:
        dim = _dim_of_rows(equation)
        if equation.primitive.name == "broadcast_in_dim" and _is_zero(equation.invars[0]):
            zeros.update(equation.outvars)
        return (equation,) if dim is None or equation.invars[0] not in zeros else _compares(equation, dim)

    return ClosedJaxpr(changed(closed.jaxpr, change), closed.consts)


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
