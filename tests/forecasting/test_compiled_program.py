from jpipe.forecasting.compiled_program import read, transfers
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
