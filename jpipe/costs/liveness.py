"""Computes the memory that a traced function needs while it runs, from the lives of its arrays; compiles nothing.

It counts operations as fused where compilers fuse them. So the result of an elementwise operation, or of a move of
elements, is an array only if another kind of operation reads it, such as a product on CPU. Until then its operands
live on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import jaxprs_in_params

from jpipe.arrays.trees import bytes_of
from jpipe.jaxprs.flat_jaxpr import without_calls
from jpipe.seam.inside import needed_part
from jpipe.seam.primitives import ELEMENTWISE, MOVES, REDUCTIONS, ClosedJaxpr, JaxprEqn, Literal, Var, shapes_of

_COSTLY = frozenset(["cos", "div", "erf", "expm1", "log", "log1p", "logistic", "pow", "rsqrt", "sin", "sqrt", "tanh"])
"""Elementwise operations that compilers carry out once, however many read their result."""
_FUSED = ELEMENTWISE | MOVES | {"dynamic_slice"}
_READ_FUSED = _FUSED | REDUCTIONS.keys()


@dataclass(frozen=True)
class Compiler:
    """Says which values a compiler makes arrays of, and where these lie; by default as a CPU's does.

    Attributes:
      into_products: whether it fuses elementwise operations into all products that read them, reads slices as they
        lie, and adds a product that nothing else reads to the sum that it is for.
      near: bytes of arrays that it holds on the chip, so that they take no memory.
      in_place: whether elementwise results take the place of what they read last, products read operands as they lie,
        and activations that wait at a boundary stay where they are.
    """

    into_products: bool = False
    near: int = 0
    in_place: bool = False

    @property
    def reads_fused(self) -> frozenset[str]:
        """The primitives that need not have an array to read."""
        return _READ_FUSED | ({"dot_general"} if self.into_products else set())

    def fuses(self, equation: JaxprEqn) -> bool:
        """Whether what an equation gives is no array of its own: single numbers are scattered in place."""
        name = equation.primitive.name
        numbers = name.startswith("scatter") and not equation.params["dimension_numbers"].update_window_dims
        return name in _FUSED or numbers


class _Held:
    """Arrays that are held at a time, on the chip while there is room."""

    def __init__(self, near: int):
        self._near, self._sizes, self._far = near, dict[Var, int](), set[Var]()

    def begin(self, arrays: Iterable[Var], copies: int = 1) -> None:
        """Begins the lives of arrays, on the chip while they fit."""
        for v in arrays:
            self._sizes[v] = _size(v) * copies
            if sum(size for other, size in self._sizes.items() if other not in self._far) > self._near:
                self._far.add(v)

    def end(self, last: Mapping[Var, int], i: int) -> None:
        """Ends the lives of the values that equation i reads last."""
        self._sizes = {v: size for v, size in self._sizes.items() if last[v] > i}

    @property
    def bytes(self) -> int:
        """The bytes of what is held in memory, off the chip."""
        return sum(size for v, size in self._sizes.items() if v in self._far)


def working_bytes(closed: ClosedJaxpr, copied: Collection[int] = (), compiler: Compiler = Compiler()) -> int:
    """The most bytes of arrays that a function's equations hold at one time, its operands not counted.

    Results count only while they are made: whoever calls the function says where they go.

    >>> import jax
    >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
    >>> working_bytes(jax.make_jaxpr(lambda x: jax.numpy.tanh(x @ x) @ x)(x))  # tanh, in the product's place; a product
    512

    Args:
      closed: the function.
      copied: indices of operands that are slices of larger arrays: each operation that isn't fused reads a copy of its
        own, which is made at the start.
      compiler: the compiler, which decides what is fused.
    """
    kept = [True] * len(closed.jaxpr.invars)
    jaxpr = without_calls(needed_part(closed, [True] * len(closed.jaxpr.outvars), keep=kept)[0]).jaxpr
    equations, slices = jaxpr.eqns, [jaxpr.invars[i] for i in copied]
    readers: dict[Var, list[int]] = defaultdict(list)
    for i, equation in enumerate(equations):
        for v in _variables(equation):
            readers[v].append(i)
    made_of = _made_of(equations, slices, readers, compiler)
    last: dict[Var, int] = defaultdict(lambda: -1)
    for v, parts in made_of.items():
        for part in parts:
            last[part] = max([last[part], *readers[v]])
    most, held = 0, _Held(compiler.near)
    for v in slices:
        held.begin([v], sum(equations[i].primitive.name not in compiler.reads_fused for i in readers[v]))
    for i, equation in enumerate(equations):
        if equation.primitive.name in ELEMENTWISE and compiler.in_place:
            held.end(last, i)
        held.begin(v for v in equation.outvars if v in made_of[v])
        most = max(most, held.bytes + _inside(equation, compiler))
        held.end(last, i)
    return most


def _made_of(
    equations: Sequence[JaxprEqn], copied: Sequence[Var], readers: Mapping[Var, Sequence[int]], compiler: Compiler
) -> dict[Var, frozenset[Var]]:
    """The arrays that have to live until each value is read: itself alone, if it is one."""

    def is_read_whole(v: Var) -> bool:
        return any(equations[i].primitive.name not in compiler.reads_fused for i in readers[v])

    made_of = {v: frozenset([v] if is_read_whole(v) else []) for v in copied}
    added = set[Var]()  # values that nothing reads but to make results of them
    for equation in reversed(equations if compiler.into_products else ()):
        for v in equation.outvars:
            fused = all(equations[i].primitive.name in _FUSED for i in readers[v])
            if fused and all(added.issuperset(equations[i].outvars) for i in readers[v]):
                added.add(v)
    for equation in equations:
        name = equation.primitive.name
        if name == "optimization_barrier":  # its results are its operands
            operands = [frozenset() if isinstance(x, Literal) else made_of.get(x, frozenset()) for x in equation.invars]
            made_of.update(zip(equation.outvars, operands, strict=True))
            continue
        parts = frozenset[Var]().union(*(made_of.get(v, ()) for v in _variables(equation)))
        once = name in _COSTLY and not compiler.into_products
        for v in equation.outvars:
            apart = not compiler.fuses(equation) or is_read_whole(v) or (once and len(readers[v]) > 1)
            made_of[v] = frozenset([v]) if apart and not (name == "dot_general" and v in added) else parts
    return made_of


def _inside(equation: JaxprEqn, compiler: Compiler) -> int:
    """Bytes that an equation needs by itself: a loop or a branch in its body, a product for operands that it turns."""
    if equation.primitive.name != "dot_general":
        bodies = jaxprs_in_params(equation.params)
        closed = [body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ()) for body in bodies]
        return max((working_bytes(body, (), compiler) for body in closed), default=0)
    if compiler.in_place:
        return 0
    contracted, batch = equation.params["dimension_numbers"]
    return sum(map(_turned, equation.invars, contracted, batch, (True, False)))


def _turned(operand: Var | Literal, contracted: Sequence[int], batch: Sequence[int], first: bool) -> int:
    """Bytes of a copy with the batch outermost and the contracted dimensions together, the first operand's last."""
    rest = [d for d in range(len(shapes_of([operand])[0].shape)) if d not in (*contracted, *batch)]
    orders = ([*batch, *rest, *contracted], *([] if first else [[*batch, *contracted, *rest]]))
    return 0 if any(order == sorted(order) for order in orders) else _size(operand)


def _variables(equation: JaxprEqn) -> set[Var]:
    return {v for v in equation.invars if not isinstance(v, Literal)}


def _size(v: Var | Literal) -> int:
    return bytes_of(shapes_of([v]))
