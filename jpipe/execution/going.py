"""Moves rows of residuals to the host and back, beside the slots of a tick (`offload=`).

Here is a stage's part in two ticks of 1F1B; micro-batch 3 goes forward as 1 goes backward, then 4 and 2:

    slot            F3              B1              F4              B2
    comes back      1 -----------|                  2 -----------|
    leaves                          3 -----------|                  4 -----------|

A row starts to come back before a slot, and has to be there after it. Only then the row of this slot is sent: else a
GPU's compiler, which sees an array on the host read and written at once, copies it whole.
"""

from __future__ import annotations

import jax

from jpipe.arrays.indexing import Index
from jpipe.execution.stage import Stage, TickCarry
from jpipe.memory.away import AwayRows
from jpipe.memory.storage import Buffers
from jpipe.schedules.ticks import Away, SlotTable

Coming = dict[str, Buffers]
"""Rows that come back, by name of `AWAY`."""


def empty(stage: Stage) -> tuple[Coming, dict[str, Buffers]]:
    """(the rows that come back for the first slot of a tick, the host's rows), of any values."""
    kept, last = stage.step.kept, stage.step.table.slots[-1]
    host = {name: storage.empty_host() for name, storage in kept.away.items()}
    return {name: kept.away[name].empty_row() for name in _returning(kept.away, last)}, host


def start(stage: Stage, slot: SlotTable, now: dict[str, Away], carry: TickCarry) -> Coming:
    """The rows that come back beside this slot, for the next one."""
    storages = stage.step.kept.away
    return {name: storages[name].fetched(carry.host[name], now[name].returns) for name in _returning(storages, slot)}


def at_hand(slot: SlotTable, now: dict[str, Away], coming: Coming, carry: TickCarry) -> TickCarry:
    """The carry with the rows that have come back for this slot's actions."""
    kept = dict(carry.forward.kept)
    for name, back in coming.items():
        rows = kept[name]
        assert isinstance(rows, AwayRows)
        stays = now[name].stays if slot.away[name].stays.any() else None
        kept[name] = rows._replace(back=back, stays=stays)
    return carry._replace(forward=carry.forward._replace(kept=kept))


def send(stage: Stage, slot: SlotTable, now: dict[str, Away], coming: Coming, carry: TickCarry) -> tuple[Coming, TickCarry]:
    """(what comes back, the carry), with the row of this slot on its way to the host, and none at hand."""
    kept, host, coming = dict(carry.forward.kept), dict(carry.host), dict(coming)
    for name, storage in stage.step.kept.away.items():
        rows = kept[name]
        assert isinstance(rows, AwayRows)
        kept[name] = AwayRows(rows.here, {}, None)
        if (slot.away[name].sent_to >= 0).any():
            leaving, came = storage.leaving(rows.here, now[name].row), coming.get(name, {})
            host[name], came, leaving = jax.lax.optimization_barrier((host[name], came, leaving))
            host[name] = storage.sent(host[name], leaving, now[name].sent_to)
            if name in coming:
                coming[name] = came
    return coming, carry._replace(forward=carry.forward._replace(kept=kept), host=host)


def _returning(storages: dict[str, object], slot: SlotTable) -> list[str]:
    """The names of which rows ever come back beside a slot."""
    return [name for name in storages if (slot.away[name].returns >= 0).any()]
