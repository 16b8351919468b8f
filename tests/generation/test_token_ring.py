"""Who works on which token when. That the tokens are right is in `test_decoding.py`."""

import pytest

from jpipe.generation.token_ring import ring
from jpipe.schedules.actions import Placement


@pytest.mark.parametrize(("chunks", "style"), [(1, "loop"), (3, "loop"), (2, "v")])
@pytest.mark.parametrize("stages", [1, 2, 4, 5])
def test_no_stage_waits_after_the_fill(stages, chunks, style):
    placement, rounds = Placement(stages, chunks, style), 4
    table = ring(placement, rounds)
    busy = table[:, 2] >= 0
    assert busy.sum() == stages * chunks * stages * rounds
    fill = len(busy) - stages * chunks * rounds
    assert fill == (stages - 1) * (2 if style == "v" else 1)
    assert busy[fill : len(busy) - fill].all()
    for stage in range(stages):
        done = [tuple(row) for row in table[busy[:, stage], :3, stage].tolist()]
        assert len(set(done)) == len(done), "each virtual stage, micro-batch and round once"
