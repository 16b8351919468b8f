"""Moves rows of residuals to the host and back, beside the slots of a tick (`offload=`).

Here is a stage's part in two ticks of 1F1B; micro-batch 3 goes forward as 1 goes backward, then 4 and 2:

    slot            F3              B1              F4              B2
    comes back      1 -----------|                  2 -----------|
    leaves                          3 -----------|                  4 -----------|

A row starts to come back before a slot and has to be there after it, and so with one that leaves. A compiler may wait
for it before the slot's work. So at the end of a slot all that moved beside it, activations and cotangents too, is tied
to what the slot left: nothing can ask for it before. Only then the slot's own row is sent: else a GPU's compiler, which
sees an array on the host read and written at once, copies it whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import jax

from jpipe.arrays.loops import when
from jpipe.execution.stage import Stage, TickCarry
from jpipe.memory.storage import Buffers
from jpipe.planning.kept import AwayRow
from jpipe.schedules.ticks import SlotTable
from jpipe.types import PyTree

Rows = dict[str, Buffers]
"""Rows of residuals by name of `AWAY`: one that has come back, or all those on the host."""


def empty_rows(stage: Stage) -> tuple[Rows, Rows]:
    """(the rows that come back for the first slot of a tick, the host's rows), of any values."""
    away, last = stage.step.kept.away, stage.step.table.slots[-1]
    back = {name: away[name].empty_row() for name in _returning(away, last)}
    return back, {name: storage.empty_host() for name, storage in away.items()}


def at_hand(stage: Stage, slot: SlotTable, now: Mapping[str, AwayRow], carry: TickCarry) -> TickCarry:
    """The carry with the row of this slot's action in `back`, also if it has stayed: then it is copied.

    Only stages that have it copy, by a loop of one trip. On GPUs such a loop would stop the host, and slices are copied
    anyway: there layers choose between the two as they read (`AwayStorage.read_back`).
    """
    if stage.step.plan.request.splits.on_gpu:
        return carry
    back = dict(carry.back)
    for name in back:
        if slot.away[name].stays.any():
            storage, at = stage.step.kept.away[name], (carry.forward.kept[name], now[name].row)
            back[name] = when(now[name].stays > 0, at, lambda at, _, of=storage: of.leaving(*at), back[name])
    return carry._replace(back=back)


def start(stage: Stage, slot: SlotTable, now: Mapping[str, AwayRow], carry: TickCarry) -> Rows:
    """The rows that come back beside this slot, for the next one."""
    away = stage.step.kept.away
    return {name: away[name].fetched(carry.host[name], now[name].returns) for name in _returning(away, slot)}


def send(
    stage: Stage, slot: SlotTable, now: Mapping[str, AwayRow], moved: tuple[Rows, PyTree], carry: TickCarry
) -> tuple[PyTree, TickCarry]:
    """Ends what moved beside a slot, and sends the slot's own row.

    Args:
      stage, slot, now: this device, the slot, and its rows now.
      moved: the rows that come back, and what crosses between stages.
      carry: as the slot left it.

    Returns:
      What crossed, and the carry with the row on its way to the host, and what came back at hand.
    """
    away = stage.step.kept.away
    if not away:
        return moved[1], carry
    names = [name for name in away if (slot.away[name].sent_to >= 0).any()]
    leaving = {name: away[name].leaving(carry.forward.kept[name], now[name].row) for name in names}
    left = carry.forward.activation, carry.backward.cotangent
    (back, crossed), host, leaving, left = jax.lax.optimization_barrier((moved, carry.host, leaving, left))
    host |= {name: away[name].sent(host[name], leaving[name], now[name].sent_to) for name in names}
    forward, backward = carry.forward._replace(activation=left[0]), carry.backward._replace(cotangent=left[1])
    return crossed, carry._replace(forward=forward, backward=backward, back=back, host=host)


def _returning(names: Iterable[str], slot: SlotTable) -> list[str]:
    """The names of the buffers from which a row comes back beside this slot."""
    return [name for name in names if (slot.away[name].returns >= 0).any()]
