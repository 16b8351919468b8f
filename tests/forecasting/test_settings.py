import math

import jax
import pytest

from jpipe.forecasting.settings import PINNED, Setting, Space, divisors, mesh_of_nowhere, shared_out
from jpipe.model.remat import MODES
from jpipe.planning.request import ENDS
from jpipe.schedules.orders import make_schedule


def space(**given):
    options = {"num_devices": 8, "data_axes": ("data",), "others": (), "batch_size": 16, "num_layers": 6, "pinned": {}}
    options["overlaps"] = False
    return Space(**{**options, **given})


def test_all_devices_are_shared_out_each_way_once():
    found = shared_out(12, ["stage", "data", "tensor"])
    assert len(found) == len(set(found)) == 18
    assert all(math.prod(size for _, size in axes) == 12 for axes in found)


def test_a_start_has_no_more_stages_than_layers_and_a_batch_that_its_axes_split():
    starts = space().starts()
    assert [dict(s.axes) for s in starts] == [{"stage": 1, "data": 8}, {"stage": 2, "data": 4}, {"stage": 4, "data": 2}]
    assert [s.num_microbatches for s in starts] == [2, 4, 8]


def test_moves_change_one_thing_at_a_time():
    given = Setting((("stage", 2), ("data", 4)), 4)
    lying, counts, ways = space().moves(given)
    assert [s.num_microbatches for s in counts] == [2, 4]  # the next ones, and 8 would give parts of half an example
    assert {(s.schedule, s.num_chunks, s.remat) for s in ways} == {
        (*way, remat) for way in [("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("v", 2)] for remat in MODES
    }
    assert {(s.ends, s.shard_over) for s in lying} == {(ends, over) for ends in ENDS for over in [(), ("data",)]}
    for way in ways:
        make_schedule(way.schedule, num_stages=2, num_microbatches=4, num_chunks=way.num_chunks)


def test_schedules_that_overlap_are_searched_where_layers_send_on_gpus():
    given = Setting((("stage", 2), ("data", 4)), 4)
    with_others, without = ({(s.schedule, s.num_chunks) for s in [*space(overlaps=o).moves(given)][2]} for o in (1, 0))
    assert with_others - without == {("overlapped", 1), ("overlapped", 2), ("overlapped-v", 2)}
    pinned = space(pinned={"schedule": "overlapped"}, overlaps=True).moves(given)
    assert {(s.schedule, s.num_chunks) for s in [*pinned][2]} == {("overlapped", 1), ("overlapped", 2)}


def test_one_stage_has_one_schedule_and_no_ends():
    lying, _, ways = space(num_devices=1).moves(Setting((("stage", 1), ("data", 1)), 4))
    assert {(s.schedule, s.ends) for s in (*ways, *lying)} == {("1f1b", "own")}
    _, _, ways = space(num_devices=1, overlaps=True).moves(Setting((("stage", 1), ("data", 1)), 4))
    assert {s.schedule for s in ways} == {"1f1b", "overlapped"}


def test_what_is_pinned_stays():
    pinned = {"num_stages": 2, "remat": "full", "num_microbatches": 4}
    starts = space(pinned=pinned).starts()
    assert [(s.num_stages, s.num_microbatches, s.remat) for s in starts] == [(2, 4, "full")]
    moved = [s for others in space(pinned=pinned).moves(starts[0]) for s in others]
    assert {(s.num_microbatches, s.remat) for s in moved} == {(4, "full")}
    assert len({s.schedule for s in moved}) > 1


def test_nothing_suits():
    nothing = space(batch_size=7, pinned={"num_microbatches": 2})
    assert not nothing.starts()
    assert "batch of 7 can be cut into [1, 7] micro-batches" in nothing.why_empty()
    assert "num_microbatches=2" in nothing.why_empty()


def test_options_are_the_pipelines():
    assert set(Setting((("stage", 2),), 4).options) == set(PINNED)


def test_a_mesh_needs_no_devices():
    mesh = mesh_of_nowhere({"stage": 64, "data": 32})
    assert mesh.size > len(jax.devices())
    assert dict(mesh.shape) == {"stage": 64, "data": 32}


@pytest.mark.parametrize("number", [1, 7, 12, 36])
def test_divisors(number):
    assert divisors(number) == [n for n in range(1, number + 1) if not number % n]
