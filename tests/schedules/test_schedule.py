"""A schedule of one's own: spelled in several ways, printed as a grid, every fault against its message."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given

import jpipe
from any_schedule import schedules
from cases import check_step, make_model
from jpipe.schedules.actions import Action
from jpipe.schedules.orders import make_schedule
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.simulate import simulate
from published import out_of_lockstep, schedule_of
from small_pipeline import loss_fn


def test_spellings_of_an_action_are_equal():
    spelled = Schedule([["F0", ("F", 1), Action("B", 0), ("B", 1, 0)]])
    assert spelled == Schedule([[Action(kind, m) for kind in "FB" for m in (0, 1)]], name="other")
    assert hash(spelled) == hash(Schedule([["F0.0", "F1", "B0", "B1"]]))
    assert spelled != Schedule([["F0", "B0", "F1", "B1"]])
    assert spelled != Schedule([["F0", "F1", "B0", "B1"]], slots=("FB",))
    assert (str(Action("F", 3)), str(Action("F", 3, 1))) == ("F3", "F3.1")


@pytest.mark.parametrize(
    ("actions", "slots", "message"),
    [
        ([], ("F", "B"), "a schedule of 0 stages has no actions"),
        ([[], []], ("F", "B"), "a schedule of 2 stages has no actions"),
        ([["F0", "X0"]], ("F", "B"), "action X0 on stage 0 has the unknown kind 'X'; use one of F, R, B, I, W"),
        ([["F0", "B0"]], ("F",), "action B0 on stage 0: no slot admits B; add it to slots=('F',) or drop it"),
        ([["F0", "I0", "B0", "W0"]], ("F", "BW"), "stage 0 has B0 and I0: a backward is whole or in two parts"),
        ([["F0", "I0"]], ("F", "B", "W"), "stage 0 lacks W0: stages need W of 1 micro-batches"),
        ([["F0", "W0", "I0"]], ("F", "B", "W"), "stage 0 waits forever at W0: it needs I0 of stage 0"),
        ([["F0", "B0", "R0"]], ("FR", "B"), "stage 0 waits forever at B0: it needs R0 of stage 0"),
        ([["F0", "B0"]], (), "slots=() is empty"),
        ([["F0", "B0"]], ("F", "BB"), "slot 'BB' of ('F', 'BB') must be a string of different kinds"),
        ([["F-1"]], ("F",), "action F-1 on stage 0 is out of range; micro-batches and chunks count from 0"),
        ([["F0", "F1", "F0"]], ("F",), "stage 0 has F0 2 times; keep one of them"),
        ([["F0"], ["F0", "F2"]], ("F",), "stage 0 lacks F1: stages need F of 3 micro-batches "
         "(F2 on stage 1 is the last) and 1 chunks; add it or drop the others"),
        ([["F0", "F0.1", "F1"]], ("F",), "stage 0 lacks F1.1"),
        ([["F0", 3]], ("F",), "stage 0 has the action 3; use Action"),
        ([["F0", ("F", True)]], ("F",), "stage 0 has the action ('F', True); use Action"),
        ([["F0"], "F0"], ("F",), "actions of stage 1 must be a sequence, got 'F0'"),
        ([["F0"]], "F", "slots must be a sequence, got 'F'"),
    ],
)  # fmt: skip
def test_the_first_fault_is_named(actions, slots, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        Schedule(actions, slots=slots)


@pytest.mark.parametrize(
    ("style", "message"),
    [
        ("w", "style='w' is unknown; use one of 'loop', 'v'"),
        ("v", 'style="v" takes two chunks a stage, there and back; the actions have 1'),
    ],
)
def test_a_style_is_known_and_fits_the_chunks(style, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Schedule([["F0", "B0"]], style=style)
    assert Schedule([["F0", "F0.1", "B0.1", "B0"]], style="v") != Schedule([["F0", "F0.1", "B0.1", "B0"]])


def test_a_wide_grid_is_the_ends_of_the_whole_one():
    """Of each line some first ticks and some last ones, as many as there is room for; how many are missing."""
    schedule = make_schedule("interleaved", num_stages=12, num_microbatches=120, num_chunks=2)
    whole, (*lines, note) = schedule.grid().splitlines(), str(schedule).splitlines()
    assert len(whole) == 14 and lines[0] == whole[0] and schedule.grid(10_000).splitlines() == whole
    for line, all_ticks in zip(lines[1:], whole[1:], strict=True):
        first, last = line.split(" ... |")
        assert all_ticks.startswith(first) and all_ticks.endswith(last) and 100 < len(line) <= 120
        ticks, missing = all_ticks.count("|") - 1, all_ticks.count("|") - line.count("|") + 1
        assert note == f"{missing} of {ticks} ticks are left out; schedule.grid() has all"


# --- csv format -------------------------------------------------------------------------------------------------------


FILES = Path(__file__).parents[1] / "data" / "pytorch"


def read(name: str) -> Schedule:
    """One of PyTorch's files. Its 1F1B's last row counts forwards from 1 to 8; here they are counted from 0."""
    text = (FILES / f"{name}.csv").read_text()
    if name == "1F1B":
        text = re.sub(r"3F(\d)", lambda found: f"3F{int(found[1]) - 1}", text)
    return Schedule.from_csv(text, name=name)


@pytest.mark.parametrize(
    ("name", "num_chunks", "style", "bubble", "rows"),
    [
        ("GPipe", 1, "loop", 9.0, (8, 0, 0)),
        ("1F1B", 1, "loop", 9.0, (4, 0, 0)),
        ("Interleaved1F1B", 2, "loop", 4.5, (11, 0, 0)),
        ("InterleavedZeroBubble", 2, "loop", 1.5, (8, 8, 4)),
        ("ZBVZeroBubble", 2, "v", 1.5, (8, 8, 7)),
        ("DualPipeV", 2, "v", 1.5, (9, 9, 4)),
    ],
)
def test_files_of_pytorch(name, num_chunks, style, bubble, rows):
    """Their bubble, as stages run them that are programs of their own, at F = I = W, and the most rows of a stage."""
    schedule = read(name)
    assert (schedule.num_stages, schedule.num_microbatches) == (4, 8)
    assert (schedule.num_chunks, schedule.style) == (num_chunks, style)
    timeline = out_of_lockstep(simulate(schedule))
    assert timeline.makespan - max(timeline.busy) == bubble
    assert tuple(map(max, schedule.ticks.rows.values())) == rows
    assert Schedule.from_csv(schedule.to_csv()) == schedule


def test_orders_by_name_are_pytorchs():
    """Its 1F1B and interleaved orders begin a backward as soon as it can be there, those for lockstep a hop later."""
    for theirs, ours in {"GPipe": "gpipe", "ZBVZeroBubble": "zb-v", "DualPipeV": "dualpipe-v"}.items():
        assert read(theirs).actions == schedule_of(ours, 4, 8).actions
    assert read("1F1B").actions != schedule_of("1f1b", 4, 8).actions


def test_a_file_of_pytorch_is_run_exactly():
    """The one of the most kinds of actions, in a V; a layer for each virtual stage, two examples a micro-batch."""
    schedule, rng = read("ZBVZeroBubble"), np.random.default_rng(0)
    layers = [nn.Dense(3 + i % 2, param_dtype=jnp.float64) for i in range(8)]
    batch = {"inputs": rng.normal(size=(16, 4)), "targets": rng.normal(size=(16, 4))}
    with jax.enable_x64(True):
        model = make_model(layers, loss_fn, batch)
        pipe = jpipe.Pipeline(layers, loss_fn, schedule=schedule, **schedule.sizes, remat="none")
        check_step(pipe, model)


@given(schedules())
def test_any_schedule_comes_back(schedule):
    """With R too, which `to_csv` wrote and `from_csv` refused."""
    text = schedule.to_csv().replace("\n", "\r\n") + "\r\n"
    assert Schedule.from_csv(text, slots=schedule.slots).actions == schedule.actions


def test_the_text_has_a_column_for_each_slot_in_time():
    schedule = make_schedule("v", num_stages=2, num_microbatches=1, num_chunks=2)
    assert schedule.to_csv() == "0F0,,,,,,3F0,3B0,,,,,,0B0\n,,1F0,,2F0,,,,,2B0,,1B0,,\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FILES, "a schedule is read from text, got PosixPath; pass Path(...).read_"),
        ((FILES / "1F1B.csv").read_text(), "stage 0 lacks F8: stages need F of 9"),  # PyTorch's own, that is wrong
        ("", "the CSV is empty; it has a row of cells for each stage, as 0F0,0F1,0B0,0B1"),
        ("0F0,0B0\n1F0,1X0", "row 1, cell 1 ('1X0') is no action; use virtual stage, kind and micro-batch"),
        ("0F0;0B0", "row 0, cell 0 ('0F0;0B0') is no action"),
        ("0F0,0SEND_F0\n0RECV_F0,1F0", "row 0, cell 1 ('0SEND_F0') is communication: jpipe sends by itself"),
        ("0F0,0B0\n\n1F0,1B0", "the CSV's rows run virtual stages that fit no placement of 3 rows (row 0: 0; row 1: ;"),
        ("0F0,0B0\n0F0,0B0", "(row 0: 0; row 1: 0); use \"loop\", row k with k, K+k, 2K+k ..., or \"v\", row k with k"),
        ("0F0,0I0", "stage 0 lacks W0"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_csv_is_named(text, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        Schedule.from_csv(text)
