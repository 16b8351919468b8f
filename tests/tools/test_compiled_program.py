import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpu_program import compile_with_text, kernels, largest_copy, needs_gpu_compiler
from jpipe.tools.chips import parse_topology
from jpipe.tools.compiled_program import COLLECTIVES, host_stops, read, transfers
from tpu_program import large_moves, largest_move, num_bytes

PROGRAM = """HloModule step

%work (p: bf16[8,128]) -> bf16[8,128] {
  %p = bf16[8,128]{1,0} parameter(0)
  ROOT %dot = bf16[8,128]{1,0} fusion(%p), calls=%inner, backend_config={"estimated_cycles":"100"}
}

%body (p: bf16[8,128]) -> bf16[8,128] {
  %p = bf16[8,128]{1,0} parameter(0)
  %start = bf16[8,128]{1,0} collective-permute-start(%p)
  %inside = bf16[8,128]{1,0} while(%p), condition=%c, body=%work, metadata={op_name="ticks/while/body/F/while"}
  %done = bf16[8,128]{1,0} collective-permute-done(%start)
  ROOT %copy = bf16[8,128]{0,1} copy(%done), backend_config={"estimated_cycles":"7"}
}

ENTRY %main (p: bf16[8,128]) -> bf16[8,128] {
  %p = bf16[8,128]{1,0} parameter(0)
  ROOT %loop = bf16[8,128]{1,0} while(%p), condition=%c, body=%body, metadata={op_name="ticks/while"}
}

%inner (p: bf16[8,128]) -> bf16[8,128] {
  ROOT %p = bf16[8,128]{1,0} parameter(0)
}
"""


def test_loops_are_found_by_their_scopes_with_their_own_cycles():
    (ticks,) = read(PROGRAM).find("ticks")
    (forward,) = ticks.find("F")
    assert (ticks.own, forward.own) == (7, 100)


def test_a_permute_knows_what_runs_between_its_start_and_its_end():
    (ticks,) = read(PROGRAM).inner
    (permute,) = transfers(ticks)
    assert [loop.name for loop in permute.loops] == ["F"]
    assert num_bytes(permute.operation) == 2048


def test_what_only_moves_is_told_by_its_size():
    assert largest_move(read(PROGRAM)) == 2048
    assert not large_moves(read(PROGRAM), 2048)
    assert large_moves(read(PROGRAM), 2047)[0].startswith("copy of 2,048 bytes in ticks")


_GPU_PROGRAM = """HloModule step

%fused_dot (a: bf16[8,16], b: bf16[16,8]) -> f32[8,8] {
  %a = bf16[8,16]{1,0} parameter(0)
  %b = bf16[16,8]{1,0} parameter(1)
  ROOT %dot = f32[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_cast (w: f32[4,16,8], i: s32[]) -> bf16[16,8] {
  %w = f32[4,16,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %slice = f32[1,16,8]{2,1,0} dynamic-slice(%w, %next, %one, %one), dynamic_slice_sizes={1,16,8}
  %row = f32[16,8]{1,0} bitcast(%slice)
  ROOT %cast = bf16[16,8]{1,0} convert(%row)
}

%fused_update (rows: f32[4,8,8], y: f32[8,8], i: s32[]) -> f32[4,8,8] {
  %rows = f32[4,8,8]{2,1,0} parameter(0)
  %y = f32[8,8]{1,0} parameter(1)
  %row = f32[1,8,8]{2,1,0} bitcast(%y)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %update = f32[4,8,8]{2,1,0} dynamic-update-slice(%rows, %row, %i, %zero, %zero)
}

%scatter (s: f32[8,8]) -> f32[4,8] {
  %s = f32[8,8]{1,0} parameter(0)
  ROOT %reduce-scatter = f32[4,8]{1,0} reduce-scatter(%s), dimensions={0}, to_apply=%add
}

%layer (p: (f32[4,16,8], s32[])) -> (f32[4,16,8], s32[]) {
  %w = f32[4,16,8]{2,1,0} get-tuple-element(%p), index=0
  %i = s32[] get-tuple-element(%p), index=1
  %x = bf16[8,16]{1,0} get-tuple-element(%p), index=2
  %rows = f32[4,8,8]{2,1,0} get-tuple-element(%p), index=3
  %cast = bf16[16,8]{1,0} fusion(%w, %i), kind=kLoop, calls=%fused_cast
  %dot = f32[8,8]{1,0} fusion(%x, %cast), kind=kCustom, calls=%fused_dot
  %update = f32[4,8,8]{2,1,0} fusion(%rows, %dot, %i), kind=kLoop, calls=%fused_update
  ROOT %t = (f32[4,16,8]{2,1,0}, s32[]) tuple(%w, %i)
}

%slot (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  %attention = (bf16[8,16]{1,0}, u8[0]{0}) custom-call(%p), custom_call_target="__cudnn$fmhaSoftmax"
  %layers = s32[] while(%p), condition=%c, body=%layer, metadata={op_name="F/while/body/Block.1/while"}
  ROOT %fixed = s32[] while(%p), condition=%c, body=%layer, metadata={op_name="F/while/body/Two.2/while"}, turns=2
}

%tick (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  %permute = (bf16[8]{0}, bf16[8]{0}) collective-permute-start(%p), source_target_pairs={{0,1}}
  %slot0 = s32[] while(%p), condition=%c, body=%slot, metadata={op_name="ticks/while/body/F/while"}
  %arrived = bf16[8]{0} collective-permute-done(%permute)
  %gather = (bf16[8]{0}, bf16[16]{0}) all-gather-start(%arrived), dimensions={0}
  %update = f32[4,8,8]{2,1,0} fusion(%p, %p, %p), kind=kLoop, calls=%fused_update
  %gathered = bf16[16]{0} all-gather-done(%gather)
  %scattering = ((f32[8,8]{1,0}), f32[4,8]{1,0}) async-start(%p), calls=%scatter
  %product = f32[8,8]{1,0} custom-call(%p, %p), custom_call_target="__cublas$gemm"
  %scattered = f32[4,8]{1,0} async-done(%scattering)
  ROOT %ends = s32[] conditional(%p, %p, %p), branch_computations={%slot, %empty}
}

%empty (p: s32[]) -> s32[] {
  ROOT %p = s32[] parameter(0)
}

ENTRY %main (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  ROOT %loop = s32[] while(%p), condition=%c, body=%tick, metadata={op_name="ticks/while"}, turns=14
}
"""
GPU_PROGRAM = re.sub(
    r"turns=(\d+)", r'backend_config={"known_trip_count":{"n":"\1"},"dynamic_variables":[]}', _GPU_PROGRAM
)


def test_counts_are_those_that_the_compiler_notes():
    (ticks,) = read(GPU_PROGRAM).find("ticks")
    assert {loop.name: loop.counted for loop in ticks.walk()} == {"ticks": 14, "F": None, "Block.1": None, "Two.2": 2}


def test_a_transfer_is_beside_products_but_not_beside_an_update():
    (ticks,) = read(GPU_PROGRAM).inner
    found = {move.operation.name: move.beside_products for move in transfers(ticks, COLLECTIVES)}
    assert found == {"permute": True, "gather": False, "scattering": True}
    assert [move.operation.name for move in transfers(ticks)] == ["permute"]
    assert [loop.has_products for loop in ticks.walk()] == [True] * 4


@pytest.mark.parametrize(("slot", "layers", "stops"), [(0, 0, 3), (0, 3, 6), (1, 0, 5), (1, 3, 11)])
def test_loops_without_a_count_stop_the_host_once_more_than_they_turn(slot, layers, stops):
    """The slot's loop and in each of its turns that over layers; the conditional and in its branch that over layers."""
    (ticks,) = read(GPU_PROGRAM).inner
    assert host_stops(ticks, lambda loop: slot if loop.name == "F" else layers) == stops


def test_kernels_and_their_bytes():
    """A slice of weights is cast, a product reads it, a row is written: not the whole buffers."""
    (layer,) = read(GPU_PROGRAM).find("Block.1")
    cast, product, update = 4 * 128 + 4 + 2 * 128, 2 * 128 + 2 * 128 + 4 * 64, 4 * 64 + 4 + 4 * 64
    found = kernels([layer])
    assert (found.count, found.cast, found.copied) == (3, cast, update)
    assert found.bytes == cast + product + update
    assert largest_copy(read(GPU_PROGRAM)) == update


@needs_gpu_compiler
def test_a_program_compiled_for_a_gpu():
    """A scan of known count, a loop of unknown count and a conditional, each with a product."""

    def function(n, x, weights):
        x = jax.lax.scan(lambda x, w: (x @ w.astype(x.dtype), None), x, weights)[0]
        x = jax.lax.fori_loop(0, n, lambda i, x: jnp.sin(x @ x), x)
        return jax.lax.cond(n > 3, lambda x: x @ x, lambda x: x, x)

    mesh = Mesh(np.asarray(parse_topology("h100:8").devices()[:1]), ("stage",))
    shape = lambda dims, dtype: jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    shapes = shape((), jnp.int32), shape((256, 256), jnp.bfloat16), shape((4, 256, 256), jnp.float32)
    program = read(compile_with_text(jax.jit(function).lower(*shapes))[1])
    assert [loop.counted for loop in program.inner] == [4, None]
    assert [[branch.has_products for branch in branches] for branches in program.branches] == [[True, False]]
    assert all(loop.has_products for loop in program.inner)
    assert host_stops(program, lambda loop: 5) == 6 + 1
    assert kernels([program.inner[0]]).cast == (4 + 2) * 256 * 256 + 4
