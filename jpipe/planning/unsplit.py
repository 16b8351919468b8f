"""Warns of layers that each device of a stage computes whole though an operand was split, with their share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jpipe.jaxprs.flops import count_flops, flops_of
from jpipe.model.traced_layer import DeviceLayer, TracedLayer
from jpipe.seam.inside import line_of
from jpipe.terminal.progress import warn_once

MUCH = 0.1
"""The share of a layer's operations from which on it is worth a warning."""
NOTHING = 1e6
"""Floating-point operations of a layer for one micro-batch that take next to nothing: no warning."""
FELT = 1e-3
"""The share of the model's operations from which on it is worth a warning."""


class WholeOperation(NamedTuple):
    """An operation that every device of a stage does whole.

    Attributes:
      operation: the name of its primitive.
      line: the user's line that it comes from, as "model.py:12"; empty if unknown.
      share: of the layer's floating-point operations, forward and backward, on whole arrays.
    """

    operation: str
    line: str
    share: float


def unsplit_in(traced: TracedLayer, layer: DeviceLayer) -> list[WholeOperation]:
    """The operations of a layer, forward and backward, that every device does whole, each line's together."""
    unsplit = [*layer.forward.unsplit, *layer.unsplit]
    total = _total(traced) if unsplit else 1.0
    shares: dict[tuple[str, str], float] = {}
    for (equation, callers, *_), times, _ in unsplit:
        key = equation.primitive.name, line_of(equation, callers)
        shares[key] = shares.get(key, 0.0) + times * flops_of(equation).flops / total
    return [WholeOperation(*key, share) for key, share in shares.items()]


def _total(traced: TracedLayer) -> float:
    """A layer's floating-point operations, forward and backward, on whole arrays; at least one."""
    return max(count_flops(traced.forward).flops + count_flops(traced.backward).flops, 1.0)


def warn_of_unsplit(trained: Sequence[TracedLayer], layers: Sequence[DeviceLayer]) -> None:
    """Warns, once, of each kind of layer of which every device does much whole, if that is some part of the model."""
    whole = [unsplit_in(traced, layer) for traced, layer in zip(trained, layers, strict=True)]
    if not any(whole):
        return
    totals = [_total(traced) * len(traced.function.group.indices) for traced in trained]
    for traced, operations, total in zip(trained, whole, totals, strict=True):
        share = sum(one.share for one in operations)
        if share > MUCH and _total(traced) > NOTHING and share * total > FELT * sum(totals):
            worst = max(operations, key=lambda one: one.share)
            group = traced.function.group
            warn_once(
                f"layer {group.indices[0]} ({group.layer.name}): {worst.operation} ({worst.line or 'of no line'}) has "
                "to see whole arrays, so that every device of a stage does it all, with others like it "
                f"{share:.0%} of the layer's operations; pipe.communication(batch) lists them"
            )
