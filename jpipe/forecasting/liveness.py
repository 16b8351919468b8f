"""What a traced function needs beside its operands while it runs, from the lives of its arrays: nothing is compiled.

What compilers fuse is taken as fused: what an elementwise operation or a move of elements gives is an array only where
something else reads it, such as a product; until then, what it is made of lives on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from jax.extend.core import jaxprs_in_params

from jpipe.jax_tools.trees import bytes_of
from jpipe.partitioner.flat_jaxpr import without_calls
from jpipe.seam.inside import needed_part
from jpipe.seam.jaxpr_types import ClosedJaxpr, JaxprEqn, Literal, Var, shapes_of
from jpipe.seam.primitives import ELEMENTWISE, MOVES, REDUCTIONS

_COSTLY = frozenset(
    ["cos", "div", "erf", "exp", "expm1", "log", "log1p", "logistic", "pow", "rsqrt", "sin", "sqrt", "tanh"]
)
"""Elementwise operations that compilers carry out once, however many read their result."""
_FUSED = ELEMENTWISE | MOVES
_READ_FUSED = _FUSED | REDUCTIONS.keys()


def working_bytes(closed: ClosedJaxpr, copied: Collection[int] = ()) -> int:
    """The most bytes of arrays that a function's equations hold at one time, its operands not counted.

    Results count only while they are made: whoever calls the function says where they go.

    >>> import jax
    >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
    >>> working_bytes(jax.make_jaxpr(lambda x: jax.numpy.tanh(x @ x) @ x)(x))  # tanh, in the product's place; a product
    512

    Args:
      closed: the function.
      copied: indices of operands that are slices of larger arrays: what isn't fused reads a copy.
    """
    kept = [True] * len(closed.jaxpr.invars)
    jaxpr = without_calls(needed_part(closed, [True] * len(closed.jaxpr.outvars), keep=kept)[0]).jaxpr
    equations, given = jaxpr.eqns, [jaxpr.invars[i] for i in copied]
    readers: dict[Var, list[int]] = defaultdict(list)
    for i, equation in enumerate(equations):
        for v in _variables(equation):
            readers[v].append(i)
    made_of = _made_of(equations, given, readers)
    last: dict[Var, int] = {}
    for v, parts in made_of.items():
        for part in parts:
            last[part] = max([last.get(part, -1), *readers[v]])
    begins: dict[int, list[Var]] = defaultdict(list)
    for v in given:
        if v in made_of[v]:
            begins[readers[v][0]].append(v)
    most, live = 0, dict[Var, int]()
    for i, equation in enumerate(equations):
        live |= {v: _size(v) for v in begins[i]}
        ends = [v for v in live if last[v] <= i]
        if equation.primitive.name in ELEMENTWISE:  # written in the place of what it reads
            live = {v: size for v, size in live.items() if v not in ends}
        live |= {v: _size(v) for v in equation.outvars if v in made_of[v]}
        most = max(most, sum(live.values()) + _inside(equation))
        live = {v: size for v, size in live.items() if last[v] > i}
    return most


def _made_of(
    equations: Sequence[JaxprEqn], given: Sequence[Var], readers: Mapping[Var, Sequence[int]]
) -> dict[Var, frozenset[Var]]:
    """For each value the arrays that have to live until it is read: itself alone, if it is one."""
    is_read_whole = lambda v: any(equations[i].primitive.name not in _READ_FUSED for i in readers[v])
    found = {v: frozenset([v] if is_read_whole(v) else []) for v in given}
    for equation in equations:
        name = equation.primitive.name
        parts = frozenset[Var]().union(*(found.get(v, ()) for v in _variables(equation)))
        for v in equation.outvars:
            apart = name not in _FUSED or is_read_whole(v) or (name in _COSTLY and len(readers[v]) > 1)
            found[v] = frozenset([v]) if apart else parts
    return found


def _inside(equation: JaxprEqn) -> int:
    """Bytes that an equation needs by itself: a loop or a branch in its body, a product for operands that it turns."""
    if equation.primitive.name != "dot_general":
        bodies = jaxprs_in_params(equation.params)
        return max(
            (working_bytes(body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())) for body in bodies),
            default=0,
        )
    contracted, batch = equation.params["dimension_numbers"]
    return sum(map(_turned, equation.invars, contracted, batch))


def _turned(operand: Var | Literal, contracted: Sequence[int], batch: Sequence[int]) -> int:
    """Bytes of a copy with the batch outermost and the contracted dimensions together, if it doesn't lie so."""
    rest = [d for d in range(len(shapes_of([operand])[0].shape)) if d not in (*contracted, *batch)]
    orders = ([*batch, *contracted, *rest], [*batch, *rest, *contracted])
    return 0 if any(order == sorted(order) for order in orders) else _size(operand)


def _variables(equation: JaxprEqn) -> set[Var]:
    return {v for v in equation.invars if not isinstance(v, Literal)}


def _size(v: Var | Literal) -> int:
    return bytes_of(shapes_of([v]))
