"""`collectives` reads programs as compilers write them."""

from types import SimpleNamespace

import numpy as np
import pytest

from collectives import axes_of, by_the_executor, intruders, largest_in_loops, read, spans_stages

PROGRAM = """
HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[2,8]{1,0})->f32[2,8]{1,0}}, num_partitions=8

%wrapped (param_0: bf16[4,16]) -> bf16[8,16] {
  %param_0 = bf16[4,16]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %gather = bf16[8,16]{1,0:T(8,128)(2,1)} all-gather(%param_0), replica_groups=[4,2]<=[2,2,2]T(0,2,1)
}

%all-reduce-scatter.2 (x: bf16[8,4]) -> bf16[2,4] {
  %x = bf16[8,4]{1,0} parameter(0)
  %scattered = bf16[8,4]{1,0} all-reduce(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %slice = bf16[2,4]{1,0} dynamic-slice(%scattered, %id), dynamic_slice_sizes={2,4}
}

%inner (p: (s32[], f32[2,8])) -> (s32[], f32[2,8]) {
  %p = (s32[], f32[2,8]{1,0}) parameter(0)
  %v = f32[2,8]{1,0} get-tuple-element(%p), index=1
  %reduced = f32[2,8]{1,0} all-reduce(%v), channel_id=2, replica_groups=[4,2]<=[8], use_global_device_ids=true, \
to_apply=%add, metadata={op_name="jit(f)/while/body/while/body/dot_general" stack_frame_id=4}
  ROOT %t = (s32[], f32[2,8]{1,0}) tuple(%i, %reduced)
}

%body (q: (s32[], f32[2,8])) -> (s32[], f32[2,8]) {
  %q = (s32[], f32[2,8]{1,0}) parameter(0)
  %inside = (s32[], /*index=1*/f32[2,8]{1,0}) while(%q), condition=%c, body=%inner
  %w = f32[2,8]{1,0} get-tuple-element(%inside), index=1
  %first-start = (f32[2,8]{1,0:T(8,128)}, f32[2,8]{1,0:T(8,128)}, u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%w), source_target_pairs={{0,4},{1,5}}, metadata={op_name="jit(f)/while/body/ppermute"}
  %fusion.1 = bf16[8,16]{1,0} fusion(%x), kind=kCustom, calls=%wrapped
  %fusion.2 = bf16[2,4]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.2
  %second-start = (f32[2,8]{1,0}, f32[2,8]{1,0}) collective-permute-start(%w), source_target_pairs={{0,1},{1,0}}
  %first-done = f32[2,8]{1,0} collective-permute-done(%first-start)
  %second-done = f32[2,8]{1,0} collective-permute-done(%second-start)
  ROOT %u = (s32[], f32[2,8]{1,0}) tuple(%j, %second-done)
}

ENTRY %main.3 (a: f32[2,8]) -> f32[2,8] {
  %a = f32[2,8]{1,0} parameter(0)
  %around = (s32[], f32[2,8]{1,0}) while(%start), condition=%c, body=%body, metadata={op_name="jit(f)/F/while"}
  %zero = s32[] constant(0)
  %joined = (f32[2,8]{1,0}, s32[]) all-reduce(%a, %zero), replica_groups={{0,2},{1,3}}, to_apply=%add
  %everywhere = f32[4,8]{1,0} all-gather(%a), channel_id=4, replica_groups={}, dimensions={0}
  %started = (f32[2,8]{1,0}, f32[4,8]{1,0}) all-gather-start(%a), replica_groups=[4,2]<=[8], dimensions={0}
  %ended = f32[4,8]{1,0} all-gather-done(%started)
  ROOT %last = f32[1,4]{1,0} reduce-scatter(f32[2,8]{1,0} %a), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
}
"""
PAIRS, HALVES = ((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 1, 2, 3), (4, 5, 6, 7))
# name, kind, bytes (the larger of what it takes and gives), groups, loops around
COLLECTIVES = [
    ("gather", "all-gather", 256, ((0, 2), (1, 3), (4, 6), (5, 7)), ("around",)),  # through a fusion
    ("scattered", "reduce-scatter", 64, HALVES, ("around",)),  # of a fusion of a reduction and a slice
    ("reduced", "all-reduce", 64, PAIRS, ("around", "inside")),
    ("first-start", "collective-permute", 64, ((0, 4), (1, 5)), ("around",)),
    ("second-start", "collective-permute", 64, ((0, 1), (1, 0)), ("around",)),
    ("joined", "all-reduce", 68, ((0, 2), (1, 3)), ()),
    ("everywhere", "all-gather", 128, (tuple(range(8)),), ()),
    ("started", "all-gather", 128, PAIRS, ()),
    ("last", "reduce-scatter", 64, HALVES, ()),
]


def mesh(*names):
    return SimpleNamespace(devices=np.arange(8).reshape((2,) * len(names)), axis_names=names)


def named(name, text=PROGRAM):
    (found,) = [c for c in read(text) if c.name == name]
    return found


def test_every_collective_is_found_once():
    assert [(c.name, c.kind, c.bytes, c.groups, c.loops) for c in read(PROGRAM)] == COLLECTIVES


def test_types_scopes_and_work_between_start_and_end():
    assert named("joined").types == ("f32[2,8]", "s32[]") and named("first-start").types == ("f32[2,8]",)
    assert named("reduced").scopes == ("jit(f)/F/while", "")
    assert {c.name for c in read(PROGRAM) if c.beside_work} == {"first-start"}


def test_axes_and_intruders():
    three, turned = mesh("stage", "fsdp", "tp"), mesh("tp", "fsdp", "stage")  # there the same groups span stages
    found = [axes_of(named(name), three) for name in ("gather", "scattered", "reduced", "first-start")]
    assert found == [("fsdp",), ("fsdp", "tp"), ("tp",), ("stage",)]
    assert spans_stages(named("everywhere"), three) and not spans_stages(named("first-start"), turned)
    assert by_the_executor(named("first-start"), three) and not by_the_executor(named("second-start"), turned)
    assert [c.name for c in intruders(PROGRAM, three)] == ["second-start"]
    names = {c.name for c in intruders(PROGRAM, turned)}
    assert names == {"scattered", "reduced", "first-start", "second-start"}
    assert largest_in_loops(PROGRAM, three) == 256


@pytest.mark.parametrize(
    ("form", "groups"),
    [
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_0'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=4,'b'=2], device_ids=(0,3,1,2,4,5,6,7) {'b'}", ((0, 3), (1, 2), (4, 5), (6, 7))),
    ],
)
def test_groups_by_the_names_of_axes(form, groups):
    """As XLA writes them since meshes have names."""
    text = PROGRAM.replace("replica_groups=[4,2]<=[8], use", f"replica_groups={form}, use")
    assert named("reduced", text).groups == groups


def test_groups_written_in_another_way_are_refused():
    with pytest.raises(ValueError, match="unknown way"):
        read(PROGRAM.replace("replica_groups=[4,2]<=[8]", "replica_groups=mesh(a)"))
