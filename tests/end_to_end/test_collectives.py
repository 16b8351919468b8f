"""`collectives` reads programs as compilers write them."""

from types import SimpleNamespace

import numpy as np
import pytest

import collectives
from collectives import axes_of, by_the_executor, in_loop, intruders, read, spans_stages

CPU = """
HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[2,8]{1,0})->f32[2,8]{1,0}}, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%inner_body.1 (p: (s32[], f32[2,8])) -> (s32[], f32[2,8]) {
  %p = (s32[], f32[2,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %v = f32[2,8]{1,0} get-tuple-element(%p), index=1
  %all-reduce.6 = f32[2,8]{1,0} all-reduce(%v), channel_id=2, replica_groups=[2,2]<=[4], use_global_device_ids=true, \
to_apply=%add, metadata={op_name="jit(f)/while/body/while/body/dot_general" stack_frame_id=4}
  ROOT %t = (s32[], f32[2,8]{1,0}) tuple(%i, %all-reduce.6)
}

%inner_condition.1 (p: (s32[], f32[2,8])) -> pred[] {
  %p = (s32[], f32[2,8]{1,0}) parameter(0)
  ROOT %c = pred[] constant(false)
}

%body.2 (q: (s32[], f32[2,8])) -> (s32[], f32[2,8]) {
  %q = (s32[], f32[2,8]{1,0}) parameter(0)
  %while.1 = (s32[], /*index=1*/f32[2,8]{1,0}) while(%q), condition=%inner_condition.1, body=%inner_body.1
  %j = s32[] get-tuple-element(%while.1), index=0
  %w = f32[2,8]{1,0} get-tuple-element(%while.1), index=1
  %ppermute.24 = f32[2,8]{1,0} collective-permute(%w), channel_id=1, source_target_pairs={{0,2},{1,3}}, \
metadata={op_name="jit(f)/shard_map/while/body/ppermute"}
  %moved = f32[2,8]{1,0} collective-permute(%ppermute.24), channel_id=7, source_target_pairs={{0,1},{1,0}}
  ROOT %u = (s32[], f32[2,8]{1,0}) tuple(%j, %moved)
}

%condition.2 (q: (s32[], f32[2,8])) -> pred[] {
  %q = (s32[], f32[2,8]{1,0}) parameter(0)
  ROOT %d = pred[] constant(false)
}

ENTRY %main.3 (a: f32[2,8]) -> f32[2,8] {
  %a = f32[2,8]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[2,8]{1,0}) tuple(%zero, %a)
  %while.2 = (s32[], f32[2,8]{1,0}) while(%start), condition=%condition.2, body=%body.2
  %b = f32[2,8]{1,0} get-tuple-element(%while.2), index=1
  %all-reduce.9 = (f32[2,8]{1,0}, s32[]) all-reduce(%b, %zero), channel_id=3, replica_groups={{0,2},{1,3}}, \
use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(f)/shard_map/psum"}
  %all-gather.1 = f32[4,8]{1,0} all-gather(%b), channel_id=4, replica_groups={}, dimensions={0}
  ROOT %r = f32[2,8]{1,0} get-tuple-element(%all-reduce.9), index=0
}
"""

TPU = """
HloModule jit_g, is_scheduled=true, num_partitions=8

%wrapped (param_0: bf16[4,16]) -> bf16[8,16] {
  %param_0 = bf16[4,16]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %gather = bf16[8,16]{1,0:T(8,128)(2,1)} all-gather(%param_0), channel_id=9, \
replica_groups=[4,2]<=[2,2,2]T(0,2,1), dimensions={0}, use_global_device_ids=true
}

%region_body (p: (s32[], bf16[4,16])) -> (s32[], bf16[4,16]) {
  %p = (s32[]{:T(128)}, bf16[4,16]{1,0:T(8,128)(2,1)}) parameter(0)
  %x = bf16[4,16]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %fusion.1 = bf16[8,16]{1,0:T(8,128)(2,1)} fusion(%x), kind=kCustom, calls=%wrapped
  %collective-permute-start = (bf16[4,16]{1,0:T(8,128)(2,1)}, bf16[4,16]{1,0:T(8,128)(2,1)}, \
u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%x), channel_id=1, source_target_pairs={{0,4},{1,5},{2,6},{3,7}}, \
metadata={op_name="jit(g)/while/body/ppermute"}
  %collective-permute-done = bf16[4,16]{1,0:T(8,128)(2,1)} collective-permute-done(%collective-permute-start)
  ROOT %t = (s32[]{:T(128)}, bf16[4,16]{1,0:T(8,128)(2,1)}) tuple(%p, %collective-permute-done)
}

%region_condition (p: (s32[], bf16[4,16])) -> pred[] {
  %p = (s32[]{:T(128)}, bf16[4,16]{1,0:T(8,128)(2,1)}) parameter(0)
  ROOT %c = pred[]{:T(512)} constant(false)
}

ENTRY %main (a: bf16[4,16]) -> f32[1,4] {
  %a = bf16[4,16]{1,0:T(8,128)(2,1)} parameter(0)
  %while = (s32[]{:T(128)}, bf16[4,16]{1,0:T(8,128)(2,1)}) while(%a), condition=%region_condition, body=%region_body
  %f = f32[4,4]{1,0} constant(0)
  %all-gather-start = (f32[4,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%f), replica_groups=[4,2]<=[8], dimensions={0}
  %all-gather-done = f32[8,4]{1,0} all-gather-done(%all-gather-start)
  ROOT %reduce-scatter.1 = f32[1,4]{1,0} reduce-scatter(f32[4,4]{1,0} %f), replica_groups={{0,1,2,3},{4,5,6,7}}, \
dimensions={0}, to_apply=%add
}
"""

HIDDEN = """
HloModule jit_h, is_scheduled=true, num_partitions=4

%all-reduce-scatter.2 (x: bf16[8,4]) -> bf16[2,4] {
  %x = bf16[8,4]{1,0} parameter(0)
  %all-reduce.3 = bf16[8,4]{1,0} all-reduce(%x), channel_id=10, replica_groups={{0,1,2,3}}, to_apply=%add
  %id = u32[] partition-id()
  ROOT %slice = bf16[2,4]{1,0} dynamic-slice(%all-reduce.3, %id), dynamic_slice_sizes={2,4}
}

%body (p: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %p = (s32[], bf16[8,4]{1,0}) parameter(0)
  %v = bf16[8,4]{1,0} get-tuple-element(%p), index=1
  %first-start = (bf16[8,4]{1,0}, bf16[8,4]{1,0}) collective-permute-start(%v), source_target_pairs={{0,1},{1,0}}
  %fusion.1 = bf16[2,4]{1,0} fusion(%v), kind=kCustom, calls=%all-reduce-scatter.2
  %second-start = (bf16[8,4]{1,0}, bf16[8,4]{1,0}) collective-permute-start(%v), source_target_pairs={{0,1},{1,0}}
  %first-done = bf16[8,4]{1,0} collective-permute-done(%first-start)
  %second-done = bf16[8,4]{1,0} collective-permute-done(%second-start)
  ROOT %t = (s32[], bf16[8,4]{1,0}) tuple(%p, %second-done)
}

ENTRY %main (a: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %a = (s32[], bf16[8,4]{1,0}) parameter(0)
  ROOT %while = (s32[], bf16[8,4]{1,0}) while(%a), condition=%c, body=%body, metadata={op_name="jit(h)/F/while"}
}
"""


def mesh(shape, names):
    return SimpleNamespace(devices=np.arange(np.prod(shape)).reshape(shape), axis_names=names)


def named(text, name):
    (found,) = [c for c in read(text) if c.name == name]
    return found


def test_every_collective_is_found_once():
    kinds = [c.kind for c in read(CPU)]
    assert sorted(kinds) == ["all-gather"] + ["all-reduce"] * 2 + ["collective-permute"] * 2
    assert sorted(c.kind for c in read(TPU)) == ["all-gather", "all-gather", "collective-permute", "reduce-scatter"]


def test_loops_around():
    assert named(CPU, "all-reduce.6").loops == ("while.2", "while.1")
    assert named(CPU, "ppermute.24").loops == ("while.2",)
    assert not in_loop(named(CPU, "all-reduce.9"))
    assert named(TPU, "gather").loops == ("while",)  # through a fusion
    assert not in_loop(named(TPU, "all-gather-start"))


@pytest.mark.parametrize(
    ("text", "name", "groups"),
    [
        (CPU, "all-reduce.6", ((0, 1), (2, 3))),
        (CPU, "all-reduce.9", ((0, 2), (1, 3))),
        (CPU, "ppermute.24", ((0, 2), (1, 3))),
        (CPU, "all-gather.1", ((0, 1, 2, 3),)),
        (TPU, "gather", ((0, 2), (1, 3), (4, 6), (5, 7))),
        (TPU, "all-gather-start", ((0, 1), (2, 3), (4, 5), (6, 7))),
        (TPU, "reduce-scatter.1", ((0, 1, 2, 3), (4, 5, 6, 7))),
    ],
)
def test_groups(text, name, groups):
    assert named(text, name).groups == groups


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        (CPU, "all-reduce.6", 64),
        (CPU, "all-reduce.9", 68),
        (CPU, "all-gather.1", 128),
        (TPU, "collective-permute-start", 128),
        (TPU, "gather", 256),
        (TPU, "all-gather-start", 128),
        (TPU, "reduce-scatter.1", 64),  # what it takes, which is more than what it gives
    ],
)
def test_bytes(text, name, count):
    assert named(text, name).bytes == count


def test_types_and_the_scopes_of_loops():
    assert named(CPU, "all-reduce.9").types == ("f32[2,8]", "s32[]")
    assert named(TPU, "collective-permute-start").types == ("bf16[4,16]",)
    assert {c.scopes for c in read(HIDDEN)} == {("jit(h)/F/while",)}
    assert named(CPU, "all-reduce.6").scopes == ("", "")


def test_work_between_start_and_end():
    assert named(HIDDEN, "first-start").beside_work
    assert not named(HIDDEN, "second-start").beside_work
    assert not named(HIDDEN, "all-reduce.3").beside_work


def test_a_fusion_of_a_reduction_and_a_slice_is_a_scatter():
    assert named(HIDDEN, "all-reduce.3").kind == "reduce-scatter"


def test_axes():
    two = mesh((2, 2), ("stage", "data"))
    assert axes_of(named(CPU, "all-reduce.6"), two) == ("data",)
    assert axes_of(named(CPU, "ppermute.24"), two) == ("stage",)
    assert spans_stages(named(CPU, "all-gather.1"), two)
    three = mesh((2, 2, 2), ("stage", "fsdp", "tp"))
    assert axes_of(named(TPU, "gather"), three) == ("fsdp",)
    assert axes_of(named(TPU, "reduce-scatter.1"), three) == ("fsdp", "tp")
    assert not spans_stages(named(CPU, "ppermute.24"), mesh((2, 2), ("data", "stage")))


def test_intruders():
    two = mesh((2, 2), ("stage", "data"))
    assert by_the_executor(named(CPU, "ppermute.24"), two)
    assert [c.name for c in intruders(CPU, two)] == ["moved"]
    turned = mesh((2, 2), ("data", "stage"))  # the same groups now span stages
    assert {c.name for c in intruders(CPU, turned)} == {"all-reduce.6", "ppermute.24", "moved"}
    assert intruders(TPU, mesh((2, 2, 2), ("stage", "fsdp", "tp"))) == []
    assert collectives.largest_in_loops(TPU, mesh((2, 2, 2), ("stage", "fsdp", "tp"))) == 256


def test_groups_by_the_names_of_axes():
    """As XLA writes them since meshes have names."""
    form = "replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_2'=2] {'axis_0'}"
    assert named(CPU.replace("replica_groups=[2,2]<=[4]", form), "all-reduce.6").groups == ((0, 2), (1, 3))
    turned = "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}"
    assert named(CPU.replace("replica_groups=[2,2]<=[4]", turned), "all-reduce.6").groups == ((0, 1), (2, 3))
    listed = "replica_groups=mesh['a'=2,'b'=2], device_ids=(0,3,1,2) {'b'}"
    assert named(CPU.replace("replica_groups=[2,2]<=[4]", listed), "all-reduce.6").groups == ((0, 3), (1, 2))


def test_groups_written_in_another_way_are_refused():
    with pytest.raises(ValueError, match="unknown way"):
        read(CPU.replace("replica_groups=[2,2]<=[4]", "replica_groups=mesh(a)"))
