"""How sums of gradients lie: late where they can be, and alike where they share a buffer."""

from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cases import VOCABULARY, WIDTH, check_step, make_model, pipeline, tokens, weighted_cross_entropy
from collectives import axes_of, in_loop, read
from jpipe.memory.storage import build_storage
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, Shard
from jpipe.planning.gradient_sums import make_gradient_sums

DATA, CONTEXT = Axis(("data", "fsdp"), (2, 2), is_data=True), Axis(("context",), (2,))


def test_gradients_of_one_buffer_are_alike():
    """Two sets of one shape, of which one's gradients are partial along `context`; a third has a buffer of its own."""
    square, other = jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((64, 2), jnp.float32)
    specs = [[P()], [P()], [P("context")]]
    storage = build_storage([[square], [square], [other]], [[0, 1], [0], [1]], device_of=range(2), specs=specs)
    apart, whole, split = (PARTIAL, PARTIAL), (PARTIAL, REPLICATED), (PARTIAL, Shard(0))
    groups = [SimpleNamespace(variable_set=v) for v in (None, 0, 1, 2)]
    layers = [SimpleNamespace(gradients_at=at) for at in ([], [apart], [whole], [split])]
    sums = make_gradient_sums(SimpleNamespace(groups=groups), layers, storage, (DATA, CONTEXT))
    (first,), second, (third,) = (known.buffers for known in storage.record_types)
    assert second == (first,)
    assert sums.partial == {first: (True, True), third: (True, False)}
    assert sums.partial_along == {first: ("data", "fsdp", "context"), third: ("data", "fsdp")}


def test_without_layers_nothing_is_summed():
    sums = make_gradient_sums(SimpleNamespace(groups=[]), [], build_storage([], [], device_of=[0]), ())
    assert sums.partial == sums.partial_along == {}


class Dense(nn.Module):
    """A residual block, on positions that `context` splits or on all of them: their kernels share a buffer."""

    splits: bool

    @nn.compact
    def __call__(self, x):
        over = P(None, "context", None) if self.splits else P(None, None, None)
        constrain = lambda x: x if jax.sharding.get_abstract_mesh().empty else jax.lax.with_sharding_constraint(x, over)
        return x + constrain(nn.tanh(nn.Dense(WIDTH, param_dtype=jnp.float64)(constrain(x))))


@pytest.fixture(scope="module")
def sequences():
    with jax.enable_x64(True):
        embed = nn.Embed(VOCABULARY, WIDTH, param_dtype=jnp.float64, dtype=jnp.float64)
        layers = [embed, *map(Dense, (True, False, True, False)), nn.Dense(VOCABULARY, param_dtype=jnp.float64)]
        return make_model(layers, weighted_cross_entropy, {name: array[:, :4] for name, array in tokens().items()})


@pytest.mark.parametrize("unroll", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sums_over_an_axis_that_splits_no_parameter_are_taken_once(make_mesh, sequences, unroll):
    with jax.enable_x64(True):
        mesh = make_mesh((2, 2, 2), ("stage", "data", "context"))
        pipe = pipeline(sequences, "1f1b", 2, 3, mesh=mesh, balance="even", unroll=unroll)
        variables, _ = check_step(pipe, sequences)
        text = jax.jit(pipe.value_and_grad).lower(variables, sequences.batch).compile().as_text()
    kernel = 8 * WIDTH * WIDTH
    sums = [
        c for c in read(text) if c.kind == "all-reduce" and "context" in (axes_of(c, mesh) or ()) and c.bytes >= kernel
    ]
    assert sums and not any(map(in_loop, sums))
    np.testing.assert_equal([axes_of(c, mesh) for c in sums], [("data", "context")] * len(sums))
