"""The placement against a walk: one micro-batch goes through all stages, once for each chunk, and comes back."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.schedules.placement import Placement

SIZES = list(itertools.product((1, 2, 3, 5), (1, 2, 3)))  # K, V


def walk(num_stages: int, num_chunks: int) -> list[tuple[int, int]]:
    """The (stage, chunk) that a micro-batch's forward visits, in order."""
    return [(stage, chunk) for chunk in range(num_chunks) for stage in range(num_stages)]


@pytest.mark.parametrize(("num_stages", "num_chunks"), SIZES)
def test_virtual_stages_are_counted_as_a_microbatch_visits_them(num_stages, num_chunks):
    placement, visits = Placement(num_stages, num_chunks), walk(num_stages, num_chunks)
    assert placement.num_virtual_stages == len(visits)
    for s, (stage, chunk) in enumerate(visits):
        assert placement.virtual_stage(stage, chunk) == s
        assert (placement.stage_of(s), placement.chunk_of(s)) == (stage, chunk)


@pytest.mark.parametrize("flow", [+1, -1])
@pytest.mark.parametrize(("num_stages", "num_chunks"), SIZES)
def test_sources_and_hops_follow_the_walk(num_stages, num_chunks, flow):
    placement, visits = Placement(num_stages, num_chunks), walk(num_stages, num_chunks)[::flow]
    sources = {at[1:]: source for at, source in placement.sources.items() if at[0] == flow}
    assert sources == {receiver: sender for sender, receiver in itertools.pairwise(visits)}
    assert placement.hops(flow) == sorted({(a[0], b[0]) for a, b in itertools.pairwise(visits)})


@pytest.mark.parametrize(("num_stages", "num_chunks"), SIZES)
def test_hops_are_a_line_with_one_chunk_and_a_ring_with_more(num_stages, num_chunks):
    stages = range(num_stages) if num_chunks > 1 else range(num_stages - 1)
    up = [(k, (k + 1) % num_stages) for k in stages]
    placement = Placement(num_stages, num_chunks)
    assert placement.hops(+1) == up
    assert placement.hops(-1) == sorted((b, a) for a, b in up)


def test_numpy_and_traced_integers_give_what_ints_give():
    placement = Placement(3, 2)

    def ask(virtual_stage):
        stage, chunk = placement.stage_of(virtual_stage), placement.chunk_of(virtual_stage)
        return stage, chunk, placement.virtual_stage(stage, chunk)

    chain = np.arange(6, dtype=np.int32)
    expected = list(zip(*map(ask, range(6)), strict=True))
    for answers in (ask(chain), jax.jit(ask)(jnp.asarray(chain))):
        assert [answer.tolist() for answer in answers] == list(map(list, expected))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_there_and_back(num_stages):
    """A micro-batch goes to the last stage, turns there, and comes back to the first one."""
    placement = Placement(num_stages, 2, "v")
    up = [(stage, 0) for stage in range(num_stages)]
    visits = [*up, *((stage, 1) for stage, _ in reversed(up))]
    for s, (stage, chunk) in enumerate(visits):
        assert placement.virtual_stage(stage, chunk) == s
        assert (placement.stage_of(s), placement.chunk_of(s)) == (stage, chunk)
    for flow, walked in ((+1, visits), (-1, visits[::-1])):
        pairs = {(a[0], b[0]) for a, b in itertools.pairwise(walked)}
        routes = placement.routes(flow)
        assert sorted(itertools.chain(*routes)) == sorted(pairs) == placement.hops(flow)
        for route in routes:
            assert len({receiver for _, receiver in route}) == len(route), "a stage hears from one by each route"
            senders = [sender for sender, receiver in route if sender != receiver]
            assert len(set(senders)) == len(senders), "and sends to one other"
