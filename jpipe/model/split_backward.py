"""Splits a layer's backward in two: gradients of its inputs (I), and those of its weights (W).

The equations of the backward are dealt out to two programs (arXiv 2401.10241 has the idea). The first, I, computes the
cotangents of the layer's inputs, and the gradients that then cost next to nothing: of biases, of scales, sums by
element. The second, W, computes the others: the products, convolutions and loops that nothing but weights need. No such
equation is in both. For y = gelu(x @ w + b) @ v:

    I   dg = dy @ v.T, dh = dg * gelu'(h), db = sum(dh), dx = dh @ w.T
    W   dv = gelu(h).T @ dy, dw = x.T @ dh

The residuals that W needs wait for it a little longer (`kept`: x and h). The values of I that it needs are stored
between I and W (the *stash*: dy and dh). The results of elementwise operations, such as gelu(h), are made again, which
takes less time than to write them down and read them back.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import jax

from jpipe.jax.flat_jaxpr import without_calls
from jpipe.jax.inside import needed_part, replaced, traced_apart
from jpipe.jax.primitives import CHEAP, FREE, ClosedJaxpr, JaxprEqn, Literal, Var, is_by_element, shapes_of

SLACK = 1.25
"""A value is made again, not stashed, if its residuals have at most so many times its own bytes."""


@dataclass(frozen=True, eq=False)
class SplitBackward:
    """The two programs of a split backward.

    Attributes:
      inputs: I: arguments of the backward -> its results in `early`, the stash.
      weights: W: arguments of the backward that `reads` lists, the stash -> its results in `late`.
      early: the indices of the backward's results that I gives.
      late: the indices of the others, which W gives.
      reads: the indices of the backward's arguments that W needs.
    """

    inputs: ClosedJaxpr
    weights: ClosedJaxpr
    early: tuple[int, ...]
    late: tuple[int, ...]
    reads: tuple[int, ...]

    @property
    def stash_indices(self) -> range:
        """The indices of the stash among the results of `inputs`."""
        return range(len(self.early), len(self.inputs.jaxpr.outvars))

    @property
    def stash(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of the stash."""
        return shapes_of(self.inputs.jaxpr.outvars[len(self.early) :])


def split_in_two(
    backward: ClosedJaxpr, urgent: Collection[int], residuals: Collection[int], num_leaves: int
) -> SplitBackward:
    """Deals out the equations of a backward.

    Args:
      backward: residuals, other values that are at hand whenever it runs, cotangents -> gradients.
      urgent: the indices of the results that another stage waits for. Where there are none (a first layer), all is
        early: then nothing would wait.
      residuals: the indices of the arguments that are residuals.
      num_leaves: how many arguments there are before the cotangents: the leaves of the vjp.
    """
    closed = without_calls(backward)
    jaxpr = closed.jaxpr
    first = _needed_for([jaxpr.outvars[i] for i in urgent], jaxpr.eqns)
    deferred: set[Var] = set()
    for equation in jaxpr.eqns if urgent else ():
        if first.isdisjoint(equation.outvars) and (_is_heavy(equation) or _has(deferred, equation.invars)):
            deferred.update(equation.outvars)
    late = tuple(i for i, v in enumerate(jaxpr.outvars) if _has(deferred, [v]))
    early = tuple(i for i in range(len(jaxpr.outvars)) if i not in late)
    leaves = jaxpr.invars[:num_leaves]
    at_hand = {*jaxpr.constvars, *(v for i, v in enumerate(leaves) if i not in residuals)}
    cut = _Cut(jaxpr.eqns, first, deferred, at_hand, {jaxpr.invars[i] for i in residuals})
    for i in late:
        cut.bring(jaxpr.outvars[i])
    reads = tuple(i for i, v in enumerate(leaves) if v in cut.needed)
    later = [e for e in jaxpr.eqns if not cut.made_later.isdisjoint(e.outvars)]
    later = _made_once(later, cut.made_later - deferred)
    stash = [v for v in cut.stash if all(v not in e.outvars for e in later)]
    results = lambda indices: [jaxpr.outvars[i] for i in indices]

    def part(equations: Sequence[JaxprEqn], **fields: list[Var | Literal]) -> ClosedJaxpr:
        # Some kernels count as needed in what takes out dead code; it looks into loops, though.
        needed = _needed_for(fields["outvars"], equations)
        equations = [e for e in equations if e.effects or _has(needed, e.outvars)]
        program = ClosedJaxpr(replaced(jaxpr, eqns=equations, **fields), closed.consts)
        return needed_part(program, [True] * len(fields["outvars"]), keep=True)[0]

    inputs = part(jaxpr.eqns, outvars=[*results(early), *stash])
    weights = part(later, invars=[*(jaxpr.invars[i] for i in reads), *stash], outvars=results(late))
    return SplitBackward(inputs, weights, early, late, reads)


def _made_once(equations: Sequence[JaxprEqn], again: set[Var]) -> list[JaxprEqn]:
    """Has the values in `again` made before products read them, not within these.

    If a product's operand is a cheap expression, a TPU's compiler may compute it once for each tile of the product.
    """
    ordered: list[JaxprEqn] = []
    made: dict[Var, Var] = {}
    for equation in equations:
        operands = equation.invars
        if _is_heavy(equation):
            for v in operands:
                if not isinstance(v, Literal) and v in again and v not in made:
                    (barrier,) = traced_apart(jax.lax.optimization_barrier, [v]).eqns
                    ordered.append(replaced(barrier, invars=[v]))
                    (made[v],) = barrier.outvars
            operands = [v if isinstance(v, Literal) else made.get(v, v) for v in operands]
        ordered.append(replaced(equation, invars=operands))
    return ordered


def _is_heavy(equation: JaxprEqn) -> bool:
    name = equation.primitive.name
    return not (is_by_element(name) or name in FREE)


class _Cut:
    """Finds the equations and values that W needs, from its results backwards.

    Args:
      equations: the equations of the whole backward.
      first: the values that results in I need.
      deferred: the values that W makes, and those that follow from them.
      at_hand: the values that both programs have.
      residuals: the values that both programs may be given.

    Attributes:
      needed: all values that W needs.
      made_later: those that its own equations make.
      stash: those that I has to hand over.
    """

    def __init__(
        self, equations: Sequence[JaxprEqn], first: set[Var], deferred: set[Var], at_hand: set[Var], residuals: set[Var]
    ):
        self._maker = {v: equation for equation in equations for v in equation.outvars}
        self._first, self._deferred, self._at_hand, self._residuals = first, deferred, at_hand, residuals
        self.needed: set[Var] = set()
        self.made_later: set[Var] = set()
        self.stash: list[Var] = []

    def bring(self, v: Var | Literal) -> None:
        """Decides how W gets a value, and brings the values that this one needs."""
        if isinstance(v, Literal) or v in self.needed:
            return
        # It is asked before v counts as needed: a value that is needed already costs nothing more.
        is_made = v in self._deferred or self._is_made_again(v)
        self.needed.add(v)
        if is_made:
            self.made_later.add(v)
            for operand in self._maker[v].invars:
                self.bring(operand)
        elif v not in self._at_hand and v not in self._residuals:
            self.stash.append(v)

    def _is_made_again(self, v: Var) -> bool:
        """Whether W makes a value itself that I could make: cheaply, from values of about as many bytes."""
        equation = self._maker.get(v)
        if equation is None or equation.primitive.name not in CHEAP:
            return False
        roots = self._roots(v)
        if roots is not None:
            return _bytes(roots - self.needed) <= SLACK * _bytes({v})
        new = {u for u in equation.invars if not isinstance(u, Literal)} - self.needed - self._at_hand
        return v not in self._first and _bytes(new) <= _bytes({v})

    def _roots(self, v: Var) -> set[Var] | None:
        """Finds the residuals from which a value follows by cheap operations; None if it needs anything else."""
        if v in self._at_hand or v in self._residuals:
            return {v} & self._residuals
        equation = self._maker.get(v)
        if equation is None or equation.primitive.name not in CHEAP:
            return None
        roots = [self._roots(u) for u in equation.invars if not isinstance(u, Literal)]
        return None if None in roots else set().union(*filter(None, roots))


def _needed_for(results: Sequence[Var | Literal], equations: Sequence[JaxprEqn]) -> set[Var]:
    """Collects all values that some results, and equations with an effect, follow from."""
    needed = {v for v in results if not isinstance(v, Literal)}
    for equation in reversed(equations):
        if equation.effects or _has(needed, equation.outvars):
            needed.update(v for v in (*equation.invars, *equation.outvars) if not isinstance(v, Literal))
    return needed


def _has(values: set[Var], variables: Sequence[Var | Literal]) -> bool:
    return any(not isinstance(v, Literal) and v in values for v in variables)


def _bytes(values: Collection[Var]) -> int:
    return sum(math.prod(shape.shape) * shape.dtype.itemsize for shape in shapes_of(list(values)))
