"""The lowered table, played through with tagged values in place of arrays: what is read must be what was expected."""

import itertools
from collections import defaultdict
from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given

from any_schedule import schedules
from cases import names
from jpipe.schedules.actions import Action, admitted
from jpipe.schedules.orders import make_schedule
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.ticks import AWAY, KEEPS, SlotTable, TickTable, lower
from published import PUBLISHED, published_of, schedule_of

Tag = tuple[str, int, int]  # kind, micro-batch, and the virtual stage that sent it
EMPTY: Tag = ("", -1, -1)
GARBAGE: Tag = ("garbage", -1, -1)
BOUNDARIES = {"activation": "F", "cotangent": "BI"}


def named(num_chunks: int) -> list[Schedule]:
    """Every schedule that has a name, jpipe's or a paper's, and these chunks, with several stages and micro-batches."""
    return [
        schedule_of(name, k, m, num_chunks)
        for name in [*names(chunks=num_chunks, split=None), *published_of(num_chunks)]
        for k in (1, 2, 3, 4)
        for m in (1, 3, 4, 6)
    ]


def play(schedule: Schedule, table: TickTable, *, keep_inputs: bool) -> None:
    """Runs the table on buffers of tags, asserting every read, every arrival and every -1."""
    written = {name: [table.rows_written(name)] * schedule.num_stages for name in BOUNDARIES}
    rows_of = written | table.rows
    buffers = {name: [[EMPTY] * rows for rows in rows_of[name]] for name in rows_of}
    left = {name: [EMPTY] * schedule.num_stages for name in BOUNDARIES}  # what a stage's last action left
    ran: list[list[Action]] = [[] for _ in schedule.actions]
    last = {name: last_readers(schedule, *kinds) for name, kinds in KEEPS.items()}
    crossing: dict[tuple[str, int, int], Tag] = {}  # sent in the slot before, and not needed by any action of this one
    for tick, (i, slot) in itertools.product(range(table.num_ticks), enumerate(table.slots)):
        sent: dict[tuple[str, int, int], Tag] = {}
        before = {name: [*tags] for name, tags in left.items()}
        for stage in range(schedule.num_stages):
            action = _action_at(slot, tick, stage)
            expected = {"activation": EMPTY, "cotangent": EMPTY}
            if action is not None:
                ran[stage].append(action)
                anew = computes_anew(schedule, stage, action, keep_inputs=keep_inputs)
                assert slot.anew[tick, stage] == anew
                expected |= _expected_reads(schedule, stage, action, anew=anew and keep_inputs)
                sent |= _sends(schedule, stage, action)
            for name, value in expected.items():
                row = getattr(slot, name)[tick, stage]
                if row >= 0:
                    assert buffers[name][stage][row] == value
                else:  # with a buffer for each route it may be where the stage's last action left it
                    assert value in (EMPTY, left[name][stage] if len(table.waiting[name]) > 1 else EMPTY)
                if action is not None and action.kind in BOUNDARIES[name]:
                    virtual_stage = schedule.placement.virtual_stage(stage, action.chunk)
                    left[name][stage] = (action.kind, action.microbatch, virtual_stage)
            for name, (writer, readers) in KEEPS.items():
                if name != "late_residual" or schedule.splits:
                    writes = anew if action and keep_inputs and writer == "F" else action and action.kind == writer
                    row = getattr(slot, name)[tick, stage]
                    _play_kept(buffers[name][stage], row, action, last[name][stage], readers, writes=bool(writes))
        following = admitted(schedule.slots[(i + 1) % len(table.slots)])
        beside = {kind for kinds in BOUNDARIES.values() for kind in kinds if not {*kinds} & {*following}}
        arrived = crossing | {key: tag for key, tag in sent.items() if key[0] not in beside}
        crossing = {key: tag for key, tag in sent.items() if key[0] in beside}
        for stage, name in itertools.product(range(schedule.num_stages), BOUNDARIES):
            columns = [int(column[tick, stage]) for column in getattr(slot, f"{name}_in")]
            # What crosses beside a slot is what the slots before it have left.
            crosses = not {*BOUNDARIES[name]} & {*admitted(schedule.slots[i])}
            brought = before[name] if crosses else left[name]
            _play_arrivals(schedule, table.waiting[name], name, stage, columns, arrived, buffers, brought)
        assert not arrived, "all that is sent has its route"
    assert not crossing
    assert tuple(map(tuple, ran)) == schedule.actions


def _play_arrivals(
    schedule: Schedule,
    rows: tuple[range, ...],
    name: str,
    stage: int,
    columns: list[int],
    arrived: dict[tuple[str, int, int], Tag],
    buffers: dict[str, list[list[Tag]]],
    left: list[Tag],
) -> None:
    """Writes what arrives by each route into its row, in the route's own buffer if each has one."""
    kinds = BOUNDARIES[name]
    routes = schedule.placement.routes(+1 if kinds == "F" else -1)
    assert len(rows) in (1, len(routes))
    for i, (route, row) in enumerate(zip(routes, columns, strict=True)):
        senders = [a for a, b in route if b == stage]
        keys = [(kind, a, stage) for kind in kinds for a in senders if (kind, a, stage) in arrived]
        tags = [arrived.pop(key) for key in keys]
        assert len(tags) <= 1
        if row < 0:
            assert not tags or (senders == [stage] and tags[0] == left[stage])
            continue
        assert row in rows[i if len(rows) > 1 else 0]
        # Where nothing new arrives, it is what the sender has left once more.
        assert not tags or tags == [left[senders[0]]]
        buffers[name][stage][row] = left[senders[0]] if senders else GARBAGE


def computes_anew(schedule: Schedule, stage: int, action: Action, *, keep_inputs: bool) -> bool:
    """Whether an action computes the forward of its micro-batch once more: R, or a backward for which no R did."""
    ahead = (stage, action._replace(kind="R")) in schedule.placed
    return action.kind == "R" or (keep_inputs and action.kind in "BI" and not ahead)


def _expected_reads(schedule: Schedule, stage: int, action: Action, *, anew: bool) -> dict[str, Tag]:
    """What an action must find in its rows, by buffer: what its neighbours in the chain of virtual stages sent."""
    virtual_stage = schedule.placement.virtual_stage(stage, action.chunk)
    reads: dict[str, Tag] = {}
    if virtual_stage > 0 and (action.kind == "F" or anew):
        reads["activation"] = ("F", action.microbatch, virtual_stage - 1)
    if virtual_stage < schedule.placement.num_virtual_stages - 1 and action.kind in "BI":
        sender = schedule.placement.stage_of(virtual_stage + 1)
        sent = Action("B", action.microbatch, schedule.placement.chunk_of(virtual_stage + 1))
        reads["cotangent"] = ("B" if (sender, sent) in schedule.placed else "I", action.microbatch, virtual_stage + 1)
    return reads


def _sends(schedule: Schedule, stage: int, action: Action) -> dict[tuple[str, int, int], Tag]:
    """What a stage sends, by kind, itself and the receiving stage."""
    virtual_stage = schedule.placement.virtual_stage(stage, action.chunk)
    receiver = virtual_stage + (1 if action.kind == "F" else -1)
    if receiver not in range(schedule.placement.num_virtual_stages) or action.kind in "RW":
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


def _play_kept(
    buffer: list[Tag], row: int, action: Action | None, last: set[Action], readers: str, *, writes: bool
) -> None:
    """What writes fills the row; readers of the same micro-batch and chunk find that, and the last one empties it."""
    if action is None:
        assert row == -1 or buffer[row] == EMPTY  # what a stage that works along writes is in nobody's way
        return
    if not {action._replace(kind=kind) for kind in readers} & last:
        # A B that is computed in parts has a row for what is between them.
        assert row == -1 or (action.kind == "B" and buffer[row] == EMPTY)
        return
    tag = ("kept", action.microbatch, action.chunk)
    if writes:
        assert buffer[row] == EMPTY  # it was emptied, so nothing live is overwritten
        buffer[row] = tag
    if action.kind in readers:
        assert buffer[row] == tag
        if action in last:
            buffer[row] = EMPTY
    assert writes or action.kind in readers or row == -1


def last_readers(schedule: Schedule, writer: str, readers: str) -> list[set[Action]]:
    """By stage the actions that are the last to read what a writer of their micro-batch and chunk wrote."""
    found: list[set[Action]] = []
    for order in schedule.actions:
        last = {action[1:]: action for action in order if action.kind in readers}
        found.append({action for action in last.values() if action._replace(kind=writer) in order})
    return found


def most_live(schedule: Schedule, apart: Collection[str], *, keep_inputs: bool) -> dict[str, tuple[int, ...]]:
    """The most values that are live at once on each stage, counted slot time by slot time; by each route, if apart."""
    times, placement = schedule.slot_times, schedule.placement
    live: dict[str, list[dict[int, list[range]]]] = {
        name: [defaultdict(list) for _ in schedule.actions] for name in (*BOUNDARIES, *KEEPS)
    }
    for (stage, action), tau in times.items():
        virtual_stage = placement.virtual_stage(stage, action.chunk)
        until = lambda kinds: max([times.get((stage, action._replace(kind=k)), tau) for k in kinds])  # noqa: B023
        for name, sender in (("activation", virtual_stage - 1), ("cotangent", virtual_stage + 1)):
            kinds = BOUNDARIES[name]
            parts = [Action(kind, action.microbatch, placement.chunk_of(sender)) for kind in kinds]
            sent = [part for part in parts if (placement.stage_of(sender), part) in times]
            if action.kind not in kinds or not sent:
                continue
            way, route = (placement.stage_of(sender), sent[0]), 0
            if name in apart:
                route = int(np.sign(stage - way[0]))
                along = [one for one in schedule.actions[stage] if one.kind in kinds]
                if route == 0 and along.index(action) == along.index(sent[0]) + 1:
                    continue  # it is there already
            again = "R" if (stage, action._replace(kind="R")) in times else "BI"
            last = until(again) if kinds == "F" and keep_inputs else tau
            beside = not {*kinds} & {*admitted(schedule.slots[(times[way] + 1) % len(schedule.slots)])}
            live[name][stage][route].append(range(times[way] + 1 + beside, last + 1))
        for name, (writer, readers) in KEEPS.items():
            writes = action.kind == writer and until(readers) > tau
            if keep_inputs and writer == "F":
                writes = computes_anew(schedule, stage, action, keep_inputs=True)
            if writes and (name != "late_residual" or schedule.splits):
                live[name][stage][0].append(range(tau, until(readers) + 1))
    slot_times = range(max(times.values()) + 1)
    most = lambda spans: max(sum(tau in span for span in spans) for tau in slot_times)
    return {name: tuple(sum(map(most, routes.values())) for routes in stages) for name, stages in live.items()}


def rows_of(table: TickTable, name: str) -> tuple[int, ...]:
    """The number of rows that each stage uses."""
    columns = np.concatenate([getattr(slot, name) for slot in table.slots])
    return tuple(len({*column.tolist()} - {-1}) for column in columns.T)


def check(schedule: Schedule, *, keep_inputs: bool) -> None:
    """Plays the schedule's table through, and compares its rows with the values that are live."""
    table = lower(schedule, keep_inputs=keep_inputs)
    play(schedule, table, keep_inputs=keep_inputs)
    apart = [name for name, buffers in table.waiting.items() if len(buffers) > 1]
    rows = most_live(schedule, apart, keep_inputs=keep_inputs)
    assert {name: rows_of(table, name) for name in rows} == rows
    assert table.rows == {name: rows[name] for name in KEEPS}


def parts_of(kinds: set[str]) -> str:
    """What all stages compute where some have a B, others parts of one."""
    return "IW" if "B" in kinds and kinds <= {*"BIW"} else ""


def check_idle_work(schedule: Schedule, *, keep_inputs: bool) -> None:
    """Plays through a table for stages that work along, and compares its runs with the actions of its ticks."""
    table = lower(schedule, keep_inputs=keep_inputs, idle_work=True)
    play(schedule, table, keep_inputs=keep_inputs)
    plain = lower(schedule, keep_inputs=keep_inputs)
    for name in KEEPS:
        assert all(a <= b <= a + 1 for a, b in zip(plain.rows[name], table.rows[name], strict=True))
        assert any(table.rows[name]) == any(plain.rows[name])
    assert [tick for run in table.runs for tick in range(run.start, run.stop)] == [*range(table.num_ticks)]
    for run, (i, slot) in itertools.product(table.runs, enumerate(table.slots)):
        ticks = slot.kind[run.start : run.stop]
        kinds_of = [{slot.kinds[code - 1] for code in tick if code} for tick in ticks.tolist()]
        of_ticks = {"".join(kinds) if len(kinds) == 1 else parts_of(kinds) for kinds in kinds_of}
        assert {run.together[i]} == of_ticks or (run.together[i] == "" and len(of_ticks) > 1)
        writers = {"residual": "RBI" if keep_inputs else "F", "w_input": "I"} if run.together[i] else {}
        for name, kinds in writers.items():
            rows = getattr(slot, name)[run.start : run.stop]
            is_kept = np.array(plain.rows[name]) > 0
            recomputes_parts = keep_inputs and schedule.splits  # `Request` refuses it
            assert (rows[:, is_kept] >= 0).all() or not {*run.together[i]} & {*kinds} or recomputes_parts


def play_away(schedule: Schedule, table: TickTable, name: str) -> int:
    """Plays the rows that go to the host through: every reader finds its value. Returns how many have come back."""
    on_device, on_host = table.away_rows[name]
    writer, readers = KEEPS[AWAY[name]]
    device = [[EMPTY] * on_device for _ in schedule.actions]
    host = [[EMPTY] * on_host for _ in schedule.actions]
    back, came_back = [EMPTY] * len(schedule.actions), 0
    for tick, (i, slot) in itertools.product(range(table.num_ticks), enumerate(table.slots)):
        for stage in range(schedule.num_stages):
            at = slot.away[name]
            row, sent_to, returns = (column[tick, stage] for column in (at.row, at.sent_to, at.returns))
            action, coming = _action_at(slot, tick, stage), GARBAGE if returns < 0 else host[stage][returns]
            # B and I read all residuals, W those that are kept for it.
            reads = action and action.kind in readers and (action.kind != "W" or AWAY[name] == "late_residual")
            if action and action.kind == writer:
                device[stage][row] = ("", action.microbatch, action.chunk)
            elif action is None and row >= 0:
                device[stage][row] = GARBAGE
            elif reads:
                value = device[stage][row] if at.stays[tick, stage] else back[stage]
                assert value[1:] == action[1:], (tick, i, stage, action)
                came_back += not at.stays[tick, stage]
            if sent_to >= 0:
                host[stage][sent_to] = device[stage][max(row, 0)]
            back[stage] = coming
    return came_back


def check_away(schedule: Schedule) -> None:
    for idle_work in (False, True):
        table = lower(schedule, idle_work=idle_work, away=True)
        for name in table.away_rows:
            assert play_away(schedule, table, name) > 0


CHECKS = {
    "each read finds what was written, in as few rows as can be": lambda schedule: check(schedule, keep_inputs=False),
    "so it is if inputs are kept": lambda schedule: check(schedule, keep_inputs=True),
    "stages that work along write where nothing is kept": lambda schedule: check_idle_work(schedule, keep_inputs=False),
    "so they do if inputs are kept": lambda schedule: check_idle_work(schedule, keep_inputs=True),
    "what goes to the host is back in time": check_away,
}


@pytest.mark.parametrize("promise", CHECKS)
@given(schedules())
def test_the_table_of_any_valid_schedule(promise, schedule):
    CHECKS[promise](schedule)
    assert any(slot.kind[-1].any() for slot in schedule.ticks.slots), "no idle tick at the end"


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("promise", CHECKS)
def test_the_tables_of_named_schedules(promise, num_chunks):
    for schedule in named(num_chunks):
        CHECKS[promise](schedule)


def test_rows_that_go_to_the_host():
    """Rows on the device, and on the host, where one may be for what is of no use."""
    rows = lambda name, **sizes: lower(make_schedule(name, num_microbatches=8, **sizes), away=True).away_rows
    assert rows("1f1b", num_stages=4) == {"residual_away": (1, 6)}
    assert rows("interleaved", num_stages=4, num_chunks=2) == {"residual_away": (1, 10)}
    assert rows("v", num_stages=4, num_chunks=2) == {"residual_away": (1, 8)}
    assert rows("gpipe", num_stages=4) == {"residual_away": (1, 9)}
    assert rows("1f1b", num_stages=1) == {}, "nothing waits"
    forward, backward = lower(make_schedule("1f1b", num_stages=2, num_microbatches=4), away=True).slots
    #   tick                    0   1   2   3   4   5
    #   stage 0                F0  F1  F2  F3
    #                                  B0  B1  B2  B3
    sent, returns = (getattr(forward.away["residual_away"], name)[:, 0].tolist() for name in ("sent_to", "returns"))
    assert (sent[:4], returns) == ([0, 1, 0, 1], [-1, -1, 0, 1, 0, 1])
    assert backward.away["residual_away"].stays.T.tolist() == [[0] * 6, [0, 1, 1, 1, 1, 0]], "on stage 1 B follows F"


def test_runs_of_named_schedules():
    runs = lambda name, **sizes: lower(make_schedule(name, num_stages=4, **sizes), idle_work=True).runs
    assert runs("1f1b", num_microbatches=8) == ((0, 3, ("F", "")), (3, 11, ("F", "B")), (11, 14, ("", "B")))
    assert runs("interleaved", num_microbatches=8, num_chunks=2)[1] == (7, 19, ("F", "B"))
    assert runs("v", num_microbatches=8, num_chunks=2)[1] == (7, 22, ("F", "B"))
    assert runs("zero_bubble", num_microbatches=16)[2] == (6, 16, ("F", "B"))
    often = lower(PUBLISHED["zb-h2"](4, 16), idle_work=True).runs
    assert often == ((0, 51, ("",)),), "kinds change often: one run"
