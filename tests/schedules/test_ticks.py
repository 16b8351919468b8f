"""The lowered table, played through with tagged values in place of arrays: what is read must be what was expected."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from any_schedule import schedules
from cases import names
from jpipe.schedules.actions import ACTION_KINDS, Action, ActionKind
from jpipe.schedules.orders import make_schedule
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.ticks import SlotTable, TickTable, lower
from jpipe.schedules.timing import slot_times

Tag = tuple[str, int, int]  # kind, micro-batch, and the virtual stage that sent it
EMPTY: Tag = ("", -1, -1)
GARBAGE: Tag = ("garbage", -1, -1)
BOUNDARIES = {"activation": "F", "cotangent": "B"}


def named(num_chunks: int) -> list[Schedule]:
    """Every schedule that has a name and these chunks, with several stages and micro-batches."""
    return [
        make_schedule(name, num_stages=k, num_microbatches=m, num_chunks=num_chunks)
        for name in names(chunks=num_chunks)
        for k in (1, 2, 3, 4)
        for m in (1, 3, 4, 6)
    ]


def play(schedule: Schedule, table: TickTable, *, keep_inputs: bool) -> None:
    """Runs the table on buffers of tags, asserting every read, every arrival and every -1."""
    written = {name: [table.rows_written(name)] * schedule.num_stages for name in BOUNDARIES}
    rows_of = written | {"residual": table.residual_rows}
    buffers = {name: [[EMPTY] * rows for rows in rows_of[name]] for name in rows_of}
    ran: list[list[Action]] = [[] for _ in schedule.actions]
    crossing: dict[tuple[str, int, int], Tag] = {}  # sent in the slot before, and not needed by any action of this one
    for tick, (i, slot) in itertools.product(range(table.num_ticks), enumerate(table.slots)):
        sent: dict[tuple[str, int, int], Tag] = {}
        for stage in range(schedule.num_stages):
            action = _action_at(slot, tick, stage)
            expected = {"activation": EMPTY, "cotangent": EMPTY}
            if action is not None:
                ran[stage].append(action)
                expected |= _expected_reads(schedule, stage, action, keep_inputs=keep_inputs)
                sent |= _sends(schedule, stage, action)
            for name, value in expected.items():
                assert _read(buffers[name][stage], getattr(slot, name)[tick, stage]) == value
            _play_residual(buffers["residual"][stage], slot.residual[tick, stage], action, schedule.trains)
        beside = {kind for kind in "FB" if kind not in table.slots[(i + 1) % len(table.slots)].kinds}
        arrived = crossing | {key: tag for key, tag in sent.items() if key[0] not in beside}
        crossing = {key: tag for key, tag in sent.items() if key[0] in beside}
        for stage, (name, kind) in itertools.product(range(schedule.num_stages), BOUNDARIES.items()):
            routes = schedule.placement.routes(+1 if kind == "F" else -1)
            for route, column in zip(routes, getattr(slot, f"{name}_in"), strict=True):
                senders, row = [a for a, b in route if b == stage], column[tick, stage]
                tags = [arrived.pop((kind, a, stage)) for a in senders if (kind, a, stage) in arrived]
                assert row >= 0 or not tags
                if row >= 0:  # where nothing arrives, what is written must be read by nobody
                    buffers[name][stage][row] = tags[0] if tags else GARBAGE
        assert not arrived, "all that is sent has its route"
    assert not crossing
    assert tuple(map(tuple, ran)) == schedule.actions


def _expected_reads(schedule: Schedule, stage: int, action: Action, *, keep_inputs: bool) -> dict[str, Tag]:
    """What an action must find in its rows, by buffer: what its neighbours in the chain of virtual stages sent."""
    virtual_stage = schedule.placement.virtual_stage(stage, action.chunk)
    reads: dict[str, Tag] = {}
    if virtual_stage > 0 and (action.kind == "F" or keep_inputs):
        reads["activation"] = ("F", action.microbatch, virtual_stage - 1)
    if virtual_stage < schedule.placement.num_virtual_stages - 1 and action.kind == "B":
        reads["cotangent"] = ("B", action.microbatch, virtual_stage + 1)
    return reads


def _sends(schedule: Schedule, stage: int, action: Action) -> dict[tuple[str, int, int], Tag]:
    """What a stage sends, by kind, itself and the receiving stage."""
    virtual_stage = schedule.placement.virtual_stage(stage, action.chunk)
    receiver = schedule.placement.neighbour(virtual_stage, +1 if action.kind == "F" else -1)
    if receiver is None:
        return {}
    key = action.kind, stage, schedule.placement.stage_of(receiver)
    return {key: (action.kind, action.microbatch, virtual_stage)}


def _action_at(slot: SlotTable, tick: int, stage: int) -> Action | None:
    """What a stage does in a slot; None where it idles."""
    kind = slot.kind[tick, stage]
    if kind == 0:
        assert slot.microbatch[tick, stage] == slot.chunk[tick, stage] == 0
        return None
    return Action(slot.kinds[kind - 1], int(slot.microbatch[tick, stage]), int(slot.chunk[tick, stage]))


def _read(buffer: list[Tag], row: int) -> Tag:
    return EMPTY if row < 0 else buffer[row]


def _play_residual(buffer: list[Tag], row: int, action: Action | None, trains: bool) -> None:
    """F writes the row, the B of the same micro-batch and chunk reads and empties it."""
    if action is None or not trains:
        assert row == -1
    elif action.kind == "F":
        assert buffer[row] == EMPTY  # B empties it, so nothing live is overwritten
        buffer[row] = ("R", action.microbatch, action.chunk)
    else:
        assert buffer[row] == ("R", action.microbatch, action.chunk)
        buffer[row] = EMPTY


def most_live(schedule: Schedule, *, keep_inputs: bool) -> dict[str, tuple[int, ...]]:
    """The most values that are live at once on each stage, counted slot time by slot time."""
    times, placement = slot_times(schedule), schedule.placement
    live: dict[str, list[list[range]]] = {
        name: [[] for _ in schedule.actions] for name in ("activation", "cotangent", "residual")
    }
    for (stage, action), tau in times.items():
        virtual_stage = placement.virtual_stage(stage, action.chunk)
        backward = times.get((stage, Action("B", action.microbatch, action.chunk)), tau)
        for name, kind, sender in (("activation", "F", virtual_stage - 1), ("cotangent", "B", virtual_stage + 1)):
            source = (placement.stage_of(sender), Action(kind, action.microbatch, placement.chunk_of(sender)))
            if action.kind == kind and source in times:
                last = backward if kind == "F" and keep_inputs else tau
                beside = kind not in schedule.slots[(times[source] + 1) % len(schedule.slots)]
                live[name][stage].append(range(times[source] + 1 + beside, last + 1))
        if action.kind == "F" and backward > tau:
            live["residual"][stage].append(range(tau, backward + 1))
    last = max(times.values())
    return {
        name: tuple(max(sum(tau in span for span in spans) for tau in range(last + 1)) for spans in stages)
        for name, stages in live.items()
    }


def rows_of(table: TickTable, name: str) -> tuple[int, ...]:
    """The rows of a buffer that each stage uses."""
    return tuple((1 + np.max([getattr(slot, name).max(axis=0) for slot in table.slots], axis=0)).tolist())


def check(schedule: Schedule, *, keep_inputs: bool) -> None:
    """Plays the schedule's table through, and compares its rows with the values that are live."""
    table = lower(schedule, keep_inputs=keep_inputs)
    play(schedule, table, keep_inputs=keep_inputs)
    rows = most_live(schedule, keep_inputs=keep_inputs)
    assert {name: rows_of(table, name) for name in rows} == rows
    assert table.residual_rows == rows["residual"]


@given(schedules(), st.booleans())
def test_any_valid_schedule_reads_what_was_written_in_as_few_rows_as_can_be(schedule, keep_inputs):
    check(schedule, keep_inputs=keep_inputs)


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("keep_inputs", [False, True])
def test_named_schedules_read_what_was_written_in_as_few_rows_as_can_be(num_chunks, keep_inputs):
    for schedule in named(num_chunks):
        check(schedule, keep_inputs=keep_inputs)


@given(schedules())
def test_no_idle_tick_at_the_end(schedule):
    table = schedule.ticks
    assert any(slot.kind[-1].any() for slot in table.slots)
    assert table is schedule.ticks


def test_table_of_1f1b_with_two_stages_and_three_microbatches():
    #   tick    |0     |1     |2     |3     |4     |
    #   stage 0 |F0 .  |F1 .  |F2 B0 |.  B1 |.  B2 |
    #   stage 1 |.  .  |F0 B0 |F1 B1 |F2 B2 |.  .  |
    table = lower(make_schedule("1f1b", num_stages=2, num_microbatches=3))
    forward, backward = table.slots
    assert (forward.kinds, backward.kinds, table.num_ticks) == ("F", "B", 5)
    by_stage = {
        "kind": ([1, 1, 1, 0, 0], [0, 1, 1, 1, 0]),
        "microbatch": ([0, 1, 2, 0, 0], [0, 0, 1, 2, 0]),
        "activation": ([-1, -1, -1, -1, -1], [-1, 0, 0, 0, -1]),  # F0 is read before F1 arrives, so one row does
        "activation_in": ([-1, -1, -1, -1, -1], [-1, -1, -1, -1, -1]),
        "residual": ([0, 1, 2, -1, -1], [-1, 0, 0, 0, -1]),
        # Three cotangents arrive on stage 0, each while the forwards of the next tick run; elsewhere row 0 is free.
        "cotangent_in": ([0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
    }
    for name, columns in by_stage.items():
        column = getattr(forward, name)
        assert tuple(map(list, (column[0] if isinstance(column, tuple) else column).T)) == columns, name
    by_stage = {
        "kind": ([0, 0, 1, 1, 1], [0, 1, 1, 1, 0]),
        "microbatch": ([0, 0, 0, 1, 2], [0, 0, 1, 2, 0]),
        "cotangent": ([-1, -1, 0, 0, 0], [-1, -1, -1, -1, -1]),
        "cotangent_in": ([-1, -1, -1, -1, -1], [-1, -1, -1, -1, -1]),
        # Three activations arrive on stage 1, each while the backwards of its tick run; elsewhere row 0 is free.
        "activation_in": ([0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
        "residual": ([-1, -1, 0, 1, 2], [-1, 0, 0, 0, -1]),
        "activation": ([-1, -1, -1, -1, -1], [-1, -1, -1, -1, -1]),
    }
    for name, columns in by_stage.items():
        column = getattr(backward, name)
        assert tuple(map(list, (column[0] if isinstance(column, tuple) else column).T)) == columns, name
    assert (*(rows_of(table, name) for name in BOUNDARIES), table.residual_rows) == ((0, 1), (1, 0), (3, 1))


def test_kept_inputs_are_there_for_the_backward():
    table = lower(make_schedule("gpipe", num_stages=2, num_microbatches=3), keep_inputs=True)
    forward, backward = table.slots
    assert list(forward.activation[:, 1]) == [-1, 0, 1, 2, -1, -1, -1]
    assert list(backward.activation[:, 1]) == [-1, -1, -1, 0, 1, 2, -1]
    assert rows_of(table, "activation") == (0, 3)


def test_arrays_are_read_only_int32_of_ticks_by_stages():
    table = make_schedule("interleaved", num_stages=3, num_microbatches=3, num_chunks=2).ticks
    for slot in table.slots:
        for name, columns in vars(slot).items():
            for column in columns if isinstance(columns, tuple) else [columns] * (name != "kinds"):
                assert (column.shape, column.dtype) == ((table.num_ticks, 3), np.int32)
                with pytest.raises(ValueError, match="read-only"):
                    column[0, 0] = 1


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (4, 8), (4, 2), (3, 7)])
def test_rows_in_flight(num_stages, num_microbatches):
    def residual_rows(name: str) -> tuple[int, ...]:
        return lower(make_schedule(name, num_stages=num_stages, num_microbatches=num_microbatches)).residual_rows

    stages = range(num_stages)
    assert residual_rows("naive") == (1,) * num_stages
    assert residual_rows("gpipe") == (num_microbatches,) * num_stages
    assert residual_rows("1f1b") == tuple(min(num_microbatches, 2 * (num_stages - 1 - k) + 1) for k in stages)
    assert residual_rows("forward") == (0,) * num_stages


def test_forward_only_keeps_no_cotangents():
    table = make_schedule("forward", num_stages=3, num_microbatches=6, num_chunks=2).ticks
    assert (*(rows_of(table, name) for name in BOUNDARIES), table.residual_rows) == ((1,) * 3, (0,) * 3, (0,) * 3)


def test_a_new_kind_is_lowered_by_its_line_in_the_table_of_kinds(monkeypatch):
    """Weight gradients apart from B: only the executor lacks them, and residuals then live until W."""
    monkeypatch.setitem(ACTION_KINDS, "W", ActionKind(flow=0, after="B"))
    orders = [["F0", "F1", "B0", "W0", "B1", "W1"], ["F0", "B0", "F1", "W0", "B1", "W1"]]
    schedule = Schedule(orders, slots=("FBW",))
    assert str(schedule).splitlines()[2:] == [
        "stage 0 |F0 |F1 |.  |B0 |W0 |.  |B1 |W1 |",
        "stage 1 |.  |F0 |B0 |F1 |W0 |B1 |W1 |.  |",
    ]
    assert lower(schedule).residual_rows == (2, 2)
    with pytest.raises(ValueError, match="stage 0 waits forever at W0: it needs B0 of stage 0"):
        Schedule([["F0", "W0", "B0"]], slots=("FBW",))
