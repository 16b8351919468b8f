"""Decides whether a forward and a backward that share a tick run as a pair, in one loop, so that transfers hide.

Where layers send (a tensor axis, weights gathered at each use), a layer waits for what it sends: the next product needs
it. A layer's backward of another micro-batch doesn't. If one body of a loop has both, a GPU's compiler has the products
of one pass run beside the transfers of the other (DualPipe's idea, arXiv 2412.19437, section 3.2.1; here in one SPMD
program). In return stages wait for what they send each other, since such a tick has no other slot beside which that
could travel. So it pays only where layers send. A TPU's compiler leaves these transfers synchronous in such a body too,
so that nothing runs beside them: there the passes run one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jpipe.model.traced_layer import DeviceLayer
from jpipe.partitioner.traffic import sent_in
from jpipe.planning.idle_work import IdleWork
from jpipe.planning.layer_ranges import LayerRanges
from jpipe.schedules.ticks import TickTable

LEAST = 0.25
"""The least share of ticks with a pair for which a step has pairs: "gpipe" has one in a single tick."""


def paired_group(
    layers: Sequence[DeviceLayer],
    ranges: LayerRanges,
    idle_work: IdleWork,
    table: TickTable,
    sizes: Mapping[str, int],
) -> int | None:
    """The group whose layers both passes of a pair go through in one loop; None if there is none for which it pays.

    All stages have to run the loop equally often, so the group is one of `idle_work`, which only steps for GPUs have.
    The caller sees to it that nothing has to happen between the two passes: that a backward doesn't compute its forward
    again, that residuals stay on the device, and that the ends aren't shared.

    Args:
      layers: for each group its forward and backward, as one device runs them.
      ranges: the layers of each virtual stage.
      idle_work: the layers that all stages compute, also where they idle.
      table: when each action runs.
      sizes: mesh axis -> how many devices it has.
    """
    paired = sum(run.stop - run.start for run in table.runs if run.pairs)
    if ranges.start.shape[1] > 1 or paired < LEAST * table.num_ticks:
        return None
    sends = lambda g: any(sent_in(jaxpr.jaxpr, sizes) for jaxpr in (layers[g].forward.jaxpr, layers[g].backward_jaxpr))
    sending = [g for g, trips in idle_work.trips.items() if trips > 1 and sends(g)]
    return max(sending, key=lambda g: idle_work.trips[g], default=None)
