"""`jpipe.layers_of`: the layers that a model, which is one module, is cut into, to be looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax

from jpipe.cutting.module import trace_whole
from jpipe.cutting.whole import cut_model
from jpipe.jax.flops import count_flops
from jpipe.layers.adapt import as_whole
from jpipe.layers.base import describe
from jpipe.memory.batches import default_inputs, without_key
from jpipe.model.loss import LossFn
from jpipe.model.trace import trace_model
from jpipe.processes.tables import Table, Tabular
from jpipe.types import Batch, PyTree, Shapes
from jpipe.users_numbers import as_integer


@dataclass(frozen=True)
class FoundLayer:
    """A layer that was found in a model.

    Attributes:
      name: as the model names its parameters.
      parameters: the paths of the variables that it has; a slice of a stacked one ends with its index, "w[3]".
      gives: the shapes of what crosses out of it, of a batch like the one that was given; of the last one the model's
        outputs.
      flops: the FLOPs of its forward.
      same_as: the index of the first layer that is the same function; its own if it is the first.
    """

    name: str
    parameters: tuple[str, ...]
    gives: Shapes
    flops: float
    same_as: int


class FoundLayers(list[FoundLayer], Tabular):
    """The layers of a model in order. Printed, or shown in a notebook, it is a table."""

    def __init__(self, title: str, layers: Iterable[FoundLayer]):
        super().__init__(layers)
        self._title = title

    def _table(self) -> Table:
        total = sum(layer.flops for layer in self) or 1.0
        rows = [
            (
                str(index),
                layer.name,
                "" if layer.same_as == index else f"as {layer.same_as}",
                str(len(layer.parameters)),
                f"{layer.flops / total:.1%}",
                describe(layer.gives),
            )
            for index, layer in enumerate(self)
        ]
        return Table(self._title, ("layer", "name", "function", "arrays", "FLOPs", "gives"), rows)


def layers_of(
    model: object,
    batch: Batch,
    loss_fn: LossFn | None = None,
    *,
    inputs: Callable[..., PyTree] | None = None,
    num_layers: int = 1,
    sown: str | Sequence[str] = (),
) -> FoundLayers:
    """The layers that a pipeline would cut a model into.

    Args:
      model: one module, a factory of one, or a `jpipe.Layer`, as for `jpipe.Pipeline`.
      batch: a micro-batch `[b, ...]` or its shapes; its values don't matter.
      loss_fn, inputs: as for `jpipe.Pipeline`. What a loss doesn't read isn't carried to the last layer.
      num_layers: how many layers are needed at least; a pipeline needs K * V.
      sown: as for `jpipe.Pipeline`.

    Raises:
      TypeError: it is no such model.
      ValueError: it has fewer places than that, or can't be traced.
    """
    layer = as_whole(model, sown)
    if layer is None:
        raise TypeError(f"model is a {type(model).__name__}; pass one module, a factory of one, or a jpipe.Layer")
    wanted = as_integer("num_layers", num_layers, "ask for a count of layers")
    read, shapes = without_key(inputs or default_inputs), jax.eval_shape(lambda batch: batch, batch)
    whole, modes = trace_whole(layer, loss_fn, read, shapes)
    cut = cut_model(whole, modes, wanted)
    traced = trace_model(cut.layers(modes), read, shapes)
    found = []
    for index, group in enumerate(map(traced.group_at, range(traced.num_layers))):
        assert group.trace is not None
        flops, parameters = count_flops(group.trace.jaxpr), tuple(cut.parameter_names(index))
        found.append(FoundLayer(cut.names[index], parameters, group.gives, flops, group.indices[0]))
    return FoundLayers(f"{layer.name}: {len(found)} layers, {len(traced.groups)} functions", found)
