"""Moves rows of residuals to the host and back, beside the slots of a tick (`offload=`).

Here is a stage's part in two ticks of 1F1B; micro-batch 3 goes forward as 1 goes backward, then 4 and 2:

    slot            F3              B1              F4              B2
    comes back      1 -----------|                  2 -----------|
    leaves                          3 -----------|                  4 -----------|

A row starts to come back before a slot, and has to be there after it. Only then the row of this slot is sent: else a
GPU's compiler, which sees an array on the host read and written at once, copies it whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import jax

from jpipe.execution.stage import Stage, TickCarry
from jpipe.memory.away import AwayRow
from jpipe.memory.storage import Buffers
from jpipe.schedules.ticks import SlotTable

Rows = dict[str, Buffers]
"""Rows of residuals by name of `AWAY`: one that has come back, or all those on the host."""


def empty(stage: Stage) -> tuple[Rows, Rows]:
    """(the rows that come back for the first slot of a tick, the host's rows), of any values."""
    away, last = stage.step.kept.away, stage.step.table.slots[-1]
    back = {name: away[name].empty_row() for name in _returning(away, last)}
    return back, {name: storage.empty_host() for name, storage in away.items()}


def start(stage: Stage, slot: SlotTable, now: Mapping[str, AwayRow], carry: TickCarry) -> Rows:
    """The rows that come back beside this slot, for the next one."""
    away = stage.step.kept.away
    return {name: away[name].fetched(carry.host[name], now[name].returns) for name in _returning(away, slot)}


def send(stage: Stage, slot: SlotTable, now: Mapping[str, AwayRow], coming: Rows, carry: TickCarry) -> TickCarry:
    """The carry with the row of this slot on its way to the host, and what came back meanwhile at hand."""
    back, host = dict(coming), dict(carry.host)
    for name, storage in stage.step.kept.away.items():
        if (slot.away[name].sent_to >= 0).any():
            leaving = storage.leaving(carry.forward.kept[name], now[name].row)
            came = {name: coming[name]} if name in coming else {}
            host[name], came, leaving = jax.lax.optimization_barrier((host[name], came, leaving))
            back |= came
            host[name] = storage.sent(host[name], leaving, now[name].sent_to)
    return carry._replace(back=back, host=host)


def _returning(names: Iterable[str], slot: SlotTable) -> list[str]:
    """Those of the names whose rows ever come back beside a slot."""
    return [name for name in names if (slot.away[name].returns >= 0).any()]
