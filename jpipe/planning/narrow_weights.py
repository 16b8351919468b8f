"""Finds the parameters that layers only cast to a narrower type, so that a narrow copy is enough.

With `cast="step"` such a copy is made once a step. A TPU's compiler does so by itself, as it moves casts out of loops.
That for GPUs leaves a cast in the loop over layers, which takes up to half as long as the layer's products. So there
`jpipe.execution.programs` makes the copies, ahead of the ticks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import jax
import numpy as np

from jpipe.jaxprs.flat_jaxpr import without_calls
from jpipe.planning.step import Step
from jpipe.seam.primitives import ClosedJaxpr, Var, shapes_of


@dataclass(frozen=True)
class WeightUses:
    """How the layers of a step use the buffers of parameters.

    Attributes:
      casts: (buffer, whether its leaves are turned for the layer, dtype) of the parameters that are cast.
      whole: the buffers with parameters that are used otherwise.
    """

    casts: set[tuple[str, bool, np.dtype]] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)


def weight_uses(step: Step) -> WeightUses:
    """Finds how a step's layers use its parameters. With `cast="use"` casts don't count, but of gathered weights."""
    layout, once = step.plan.at_work["params"], step.plan.request.options.cast == "step"
    uses = WeightUses()
    for g, group in enumerate(step.model.groups):
        if (v := group.variable_set) is None:
            continue
        record, cast_once = layout.storage.record_types[v], once or v in layout.brought
        leaves = zip(record.buffers, record.leaves, strict=True)
        buffers = [(name, layout.storage.buffers[name].shape[1:] != leaf.shape) for name, leaf in leaves]
        for closed, params, num_results in _programs(step, g, len(buffers)):
            for i, dtype in _readers(closed, num_results):
                if i in params and cast_once and dtype is not None:
                    uses.casts.add((*buffers[params[i]], dtype))
                elif i in params:
                    uses.whole.add(buffers[params[i]][0])
    return uses


@lru_cache(maxsize=256)  # a search asks for each under many schedules
def _readers(closed: ClosedJaxpr, num_results: int) -> frozenset[tuple[int, np.dtype | None]]:
    """Finds what reads each argument: (its index, the dtype of a cast; None of what isn't one, such as a result)."""
    jaxpr = without_calls(closed).jaxpr
    index = {v: i for i, v in enumerate(jaxpr.invars)}
    readers = set[tuple[int, np.dtype | None]]((index[v], None) for v in jaxpr.outvars[:num_results] if v in index)
    for equation in jaxpr.eqns:
        is_cast = equation.primitive.name == "convert_element_type"
        dtype = shapes_of(equation.outvars)[0].dtype if is_cast else None
        readers |= {(index[v], dtype) for v in equation.invars if isinstance(v, Var) and v in index}
    return frozenset(readers)


def narrow_dtypes(step: Step) -> dict[str, np.dtype]:
    """The dtype of each buffer of parameters that a step on GPUs copies ahead of the ticks, to one narrower dtype.

    All leaves of such a buffer are only cast.
    """
    request, buffers = step.plan.request, step.storages["params"].buffers
    if not request.splits.on_gpu or request.options.cast != "step":
        return {}
    uses, dtypes = weight_uses(step), dict[str, set[np.dtype]]()
    for name, _, dtype in uses.casts:
        dtypes.setdefault(name, set()).add(dtype)
    is_narrower = lambda name, found: found.itemsize < buffers[name].dtype.itemsize
    alone = {name: found.pop() for name, found in dtypes.items() if len(found) == 1}
    return {n: dtype for n, dtype in alone.items() if n not in uses.whole and is_narrower(n, dtype)}


def _programs(step: Step, g: int, num_params: int) -> Iterator[tuple[ClosedJaxpr, dict[int, int], int]]:
    """Yields what a layer of a group runs: (jaxpr, index of an argument -> a parameter's number, number of results)."""
    first = {i: i for i in range(num_params)}  # parameters are the first arguments
    layer = step.layers[g] if step.layers else None
    for one in dict.fromkeys([step.forwards[g], layer.forward]) if layer else [step.forwards[g]]:
        yield one.jaxpr, first, len(jax.tree.leaves(one.results))
    if layer:
        arguments = {i: source.number for i, source in enumerate(layer.sources) if source.where == "argument"}
        params = {i: number for i, number in arguments.items() if number < num_params}
        yield layer.backward_jaxpr, params, len(layer.backward_jaxpr.out_avals)
