"""Splits a layer's backward in two: gradients of its inputs (I), and those of its weights (W).

The equations of the backward are dealt out to two programs (arXiv 2401.10241 has the idea). The first, I, computes the
cotangents of the layer's inputs, and the gradients that then cost next to nothing: of biases, of scales, sums by
element. The second, W, computes the others: the products, convolutions and loops that nothing but weights need. No such
equation is in both. For y = gelu(x @ w + b) @ v:

    I   dg = dy @ v.T, dh = dg * gelu'(h), db = sum(dh), dx = dh @ w.T
    W   dv = gelu(h).T @ dy, dw = x.T @ dh

The residuals that W needs wait for it a little longer (x and h). The values of I that it needs are stored
between I and W (`w_inputs`: dy and dh). The results of elementwise operations, such as gelu(h), are made again, which
takes less time than to write them down and read them back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import jax

from jpipe.jax.flat_jaxpr import FlatEquation, FlatJaxpr, flatten, jaxpr_of
from jpipe.jax.inside import needed_part
from jpipe.jax.primitives import CHEAP, FREE, ClosedJaxpr, is_by_element, shapes_of
from jpipe.jax.trees import bytes_of

SLACK = 1.25
"""A value is made again, not handed over, if its residuals have at most so many times its own bytes."""


@dataclass(frozen=True, eq=False)
class SplitBackward:
    """The two programs of a split backward.

    Attributes:
      inputs: I: arguments of the backward -> its results in `early`, then `w_inputs`.
      weights: W: arguments of the backward that `reads` lists, then `w_inputs` -> its results in `late`.
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
    def w_input_indices(self) -> range:
        """The indices of `w_inputs` among the results of `inputs`."""
        return range(len(self.early), len(self.inputs.jaxpr.outvars))

    @property
    def w_inputs(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of what I hands over to W."""
        return shapes_of(self.inputs.jaxpr.outvars[len(self.early) :])


def split_in_two(
    backward: ClosedJaxpr, urgent: Collection[int], residuals: Collection[int], num_leaves: int
) -> SplitBackward:
    """Deals out the equations of a backward.

    Args:
      backward: residuals, other values that are there whenever it runs, cotangents -> gradients.
      urgent: the indices of the results that another stage waits for. Where there are none (a first layer), all is
        early: then nothing would wait.
      residuals: the indices of the arguments that are residuals.
      num_leaves: how many arguments there are before the cotangents: the leaves of the vjp.
    """
    flat = flatten(backward)
    results = lambda indices: [flat.results[i] for i in indices]
    needed = [flat.equations[i] for i in flat.needed_for(results(urgent), effects=True)]
    first = {*results(urgent), *(value for one in needed for value in (*one.reads, *one.makes))}
    deferred = set[int]()
    for one in flat.equations if urgent else ():
        if first.isdisjoint(one.makes) and (_is_heavy(one) or not deferred.isdisjoint(one.reads)):
            deferred.update(one.makes)
    late = tuple(i for i, value in enumerate(flat.results) if value in deferred)
    early = tuple(i for i in range(len(flat.results)) if i not in late)
    leaves = flat.arguments[:num_leaves]
    in_both = {*flat.constants, *(value for i, value in enumerate(leaves) if i not in residuals)}
    for_w = _NeededByW(flat, first, deferred, in_both, {flat.arguments[i] for i in residuals})
    for value in results(late):
        for_w.add(value)
    reads = tuple(i for i, value in enumerate(leaves) if value in for_w.needed)
    later = [one for one in flat.equations if not for_w.made_later.isdisjoint(one.makes)]
    later = _made_once(flat, later, for_w.made_later - deferred)
    w_inputs = [value for value in for_w.w_inputs if all(value not in one.makes for one in later)]

    def part(equations: Sequence[FlatEquation], takes: Sequence[int], gives: Sequence[int]) -> ClosedJaxpr:
        # Some kernels count as needed in what takes out dead code; it looks into loops, though.
        whole = replace(flat, equations=equations)
        chosen = [equations[i] for i in whole.needed_for(gives, effects=True)]
        return needed_part(jaxpr_of(flat, chosen, takes, gives), [True] * len(gives), keep=True)[0]

    inputs = part(flat.equations, flat.arguments, [*results(early), *w_inputs])
    weights = part(later, [*(flat.arguments[i] for i in reads), *w_inputs], results(late))
    return SplitBackward(inputs, weights, early, late, reads)


def _made_once(flat: FlatJaxpr, equations: Sequence[FlatEquation], again: set[int]) -> list[FlatEquation]:
    """Has the values in `again` made before products read them, not within these.

    If a product's operand is a cheap expression, a TPU's compiler may compute it once for each tile of the product.
    """
    ordered: list[FlatEquation] = []
    made: dict[int, int] = {}
    for one in equations:
        if _is_heavy(one):
            for value in [value for value in dict.fromkeys(one.reads) if value in again and value not in made]:
                made[value] = len(flat.avals)
                flat.avals.append(flat.avals[value])
                (barrier,) = jax.make_jaxpr(jax.lax.optimization_barrier)(flat.avals[value]).eqns
                ordered.append(FlatEquation(barrier, (), (value,), (made[value],)))
            one = one._replace(reads=tuple(made.get(value, value) for value in one.reads))
        ordered.append(one)
    return ordered


def _is_heavy(one: FlatEquation) -> bool:
    name = one.equation.primitive.name
    return not (is_by_element(name) or name in FREE)


class _NeededByW:
    """Finds the equations and values that W needs, from its results backwards.

    Args:
      flat: the whole backward.
      first: the values that results in I need.
      deferred: the values that W makes, and those that follow from them.
      in_both: the values that both programs have.
      residuals: the values that both programs may be given.

    Attributes:
      needed: all values that W needs.
      made_later: those that its own equations make.
      w_inputs: those that I has to hand over.
    """

    def __init__(self, flat: FlatJaxpr, first: set[int], deferred: set[int], in_both: set[int], residuals: set[int]):
        self._avals, self._maker = flat.avals, {value: one for one in flat.equations for value in one.makes}
        self._first, self._deferred, self._in_both, self._residuals = first, deferred, in_both, residuals
        self.needed = set[int]()
        self.made_later = set[int]()
        self.w_inputs = list[int]()

    def add(self, value: int) -> None:
        """Decides how W gets a value, and adds the values that this one needs."""
        if value in self.needed:
            return
        # It is asked before the value counts as needed: one that is needed already costs nothing more.
        is_made = value in self._deferred or self._is_made_again(value)
        self.needed.add(value)
        if is_made:
            self.made_later.add(value)
            for operand in self._maker[value].reads:
                self.add(operand)
        elif value not in self._in_both and value not in self._residuals:
            self.w_inputs.append(value)

    def _is_made_again(self, value: int) -> bool:
        """Whether W makes a value itself that I could make: cheaply, from values of about as many bytes."""
        one = self._maker.get(value)
        if one is None or one.equation.primitive.name not in CHEAP:
            return False
        roots = self._roots(value)
        if roots is not None:
            return self._bytes(roots - self.needed) <= SLACK * self._bytes({value})
        new = {*one.reads} - self.needed - self._in_both
        return value not in self._first and self._bytes(new) <= self._bytes({value})

    def _roots(self, value: int) -> set[int] | None:
        """Finds the residuals from which a value follows by cheap operations; None if it needs anything else."""
        if value in self._in_both or value in self._residuals:
            return {value} & self._residuals
        one = self._maker.get(value)
        if one is None or one.equation.primitive.name not in CHEAP:
            return None
        roots = list(map(self._roots, one.reads))
        return None if None in roots else set().union(*filter(None, roots))

    def _bytes(self, values: Collection[int]) -> int:
        return bytes_of([self._avals[value] for value in values])
