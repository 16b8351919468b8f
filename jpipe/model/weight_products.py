"""Computes gradients of weights on CPUs by products of operands as they lie, which takes less time.

For y = x @ w JAX's derivative computes the gradient of w as (dy.T @ x).T, summed over all dimensions of examples at
once. A TPU's compiler chooses layouts so that nothing is turned. XLA's for CPUs turns dy in memory, then multiplies two
operands that both lie the wrong way. As here, over one dimension of all examples, it takes less time
(`benchmarks/weight_products.py`), and as much memory or less.
"""

from __future__ import annotations

import math
from collections import Counter

import jax

from jpipe.jax.inside import in_place_of, replaced
from jpipe.jax.primitives import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, shapes_of
from jpipe.jax.tracing import inside_of_calls


def weight_products_as_they_lie(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Rewrites one device's jaxpr to compute gradients of weights so, inside of calls and loops too.

    Those are products that are summed over the first dimensions of both operands, turned or not. The same numbers are
    multiplied and added up, maybe in another order.

    >>> import jax, jax.numpy as jnp
    >>> x, w, dy = jnp.ones((2, 8, 3)), jnp.ones((3, 5)), jnp.ones((2, 8, 5))
    >>> gradient = jax.make_jaxpr(lambda x, dy: jax.vjp(lambda w: x @ w, w)[1](dy))(x, dy)
    >>> [str(equation.primitive) for equation in gradient.jaxpr.eqns][-2:]
    ['dot_general', 'transpose']
    >>> [str(equation.primitive) for equation in weight_products_as_they_lie(gradient).jaxpr.eqns][-3:]
    ['reshape', 'reshape', 'dot_general']
    """
    return ClosedJaxpr(_changed(closed.jaxpr), closed.consts)


def _changed(jaxpr: Jaxpr) -> Jaxpr:
    uses = Counter(v for equation in jaxpr.eqns for v in equation.invars if not isinstance(v, Literal))
    uses.update(v for v in jaxpr.outvars if not isinstance(v, Literal))
    transposes = [e for e in jaxpr.eqns if e.primitive.name == "transpose"]
    turns = {v: e for e in transposes if isinstance(v := e.invars[0], Var) and uses[v] == 1}
    equations: list[JaxprEqn] = []
    done: set[Var] = set()  # results of transposes that products give already
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general" and _is_of_weights(equation):
            turn = turns.get(equation.outvars[0])
            if turn is not None and _swaps(equation, turn):
                done.update(turn.outvars)
                equation = replaced(equation, invars=equation.invars[::-1], outvars=turn.outvars)
            equations += _as_they_lie(equation)
        elif done.isdisjoint(equation.outvars):
            equations.append(inside_of_calls(equation, _changed))
    return replaced(jaxpr, eqns=equations)


def _is_of_weights(product: JaxprEqn) -> bool:
    """Whether a product is summed over the first dimensions of both operands, and both have others."""
    (first, second), (batch, _) = product.params["dimension_numbers"]
    precision = product.params["precision"]
    # A pair of precisions, and an algorithm that isn't one of JAX's own, says something of each operand.
    tells_apart = isinstance(precision, tuple) and len({*precision}) > 1
    rest = [len(shape.shape) - len(first) for shape in shapes_of(product.invars)]
    leading = tuple(first) == tuple(second) == tuple(range(len(first)))
    return bool(first) and leading and not batch and all(rest) and not tells_apart


def _swaps(product: JaxprEqn, transpose: JaxprEqn) -> bool:
    """Whether the transpose puts the dimensions of the product's second operand before those of its first."""
    first, second = shapes_of(product.invars)
    summed = len(product.params["dimension_numbers"][0][0])
    count, others = len(first.shape) - summed, len(second.shape) - summed
    return transpose.params["permutation"] == (*range(count, count + others), *range(count))


def _as_they_lie(product: JaxprEqn) -> list[JaxprEqn]:
    """Makes equations for x.T @ dy, `[examples, n]` and `[examples, m]`, or the transpose of dy.T @ x if n > m.

    With few columns on the left XLA's product is faster. Without the barrier its compiler would swap them back.
    """
    summed = len(product.params["dimension_numbers"][0][0])
    options = {name: product.params[name] for name in ("precision", "preferred_element_type")}

    def multiply(x: jax.Array, dy: jax.Array) -> jax.Array:
        shape = x.shape[summed:] + dy.shape[summed:]
        rows = math.prod(x.shape[:summed])
        x, dy = (a.reshape(rows, math.prod(a.shape[summed:])) for a in (x, dy))  # of no elements too
        over_rows = lambda a, b: jax.lax.dot_general(a, b, (((0,), (0,)), ((), ())), **options)
        if x.shape[1] <= dy.shape[1]:
            return over_rows(x, dy).reshape(shape)
        return jax.lax.optimization_barrier(over_rows(dy, x)).T.reshape(shape)

    return in_place_of(product, multiply)
