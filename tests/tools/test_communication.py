"""What a pipeline sends, against what its compiled program holds, and counts by hand."""

from xml.etree import ElementTree

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jpipe
from collectives import read
from device_programs import programs_for
from jpipe.tools.communication import BACKWARD, FORWARD, TICK

WIDTH, ROWS = 64, 16


class FeedForward(nn.Module):
    """Megatron's: a sum of the activation forward, one backward."""

    @nn.compact
    def __call__(self, x):
        split = lambda *names: nn.with_partitioning(nn.initializers.lecun_normal(), names)
        up = self.param("up", split(None, "model"), (WIDTH, 4 * WIDTH))
        down = self.param("down", split("model", None), (4 * WIDTH, WIDTH))
        with jax.named_scope("B"):  # as the backward is called in jpipe
            return jnp.sin(jnp.tanh(x @ up) @ down)


class Whole(nn.Module):
    """A convolution of images whose rows a constraint splits: windows reach beyond a device's part."""

    @nn.compact
    def __call__(self, x):
        images = x.reshape(-1, 8, 8, 1)
        images = jax.lax.with_sharding_constraint(images, PartitionSpec(None, "model"))
        return nn.Conv(128, (3, 3))(images).reshape(x.shape[0], -1)


def make(layers, mesh, **options):
    loss = lambda y, _: jnp.mean(jnp.square(y))
    return jpipe.Pipeline(layers, loss, **{"num_stages": 2, "num_microbatches": 2, "mesh": mesh, **options})


X = np.ones((2 * ROWS, WIDTH), np.float32)


@pytest.fixture(scope="module")
def pipe():
    mesh = jax.make_mesh((2, 2, 2), ("stage", "fsdp", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    return make([nn.Dense(WIDTH), *[FeedForward() for _ in range(4)], nn.Dense(4)], mesh, remat="none")


@pytest.fixture(scope="module")
def found(pipe):
    return pipe.communication(X)


def test_a_layer_adds_its_activation_up_once_in_each_direction(found):
    part = ROWS // 2 * WIDTH * 4  # a device's examples, in float32
    for loop in ("forward", "backward"):
        of_blocks = [t for t in found.transfers if t.loop == loop and t.layer == "FeedForward 1-4"]
        assert sum(t.bytes for t in of_blocks) == part  # 2 (p - 1) / p of it, p = 2
        assert {t.axes for t in of_blocks} == {("model",)}
    by_users = [t for t in found.transfers if t.layer.startswith("FeedForward") and t.line]
    assert by_users and all(t.line.startswith("test_communication.py:") for t in by_users)


def test_boundaries_and_gradients(found):
    permutes = [t for t in found.transfers if t.loop == "between stages"]
    assert [(t.collective, t.axes, t.count) for t in permutes] == [("permute", ("stage",), 2)]
    assert found.bytes("between stages") == 2 * (ROWS // 2 * WIDTH * 4)
    assert {t.axes for t in found.transfers if t.loop == "step"} <= {("fsdp",), ("stage",), ("stage", "fsdp")}


def test_it_is_what_the_compiler_is_given(pipe, found):
    shapes = jax.eval_shape(pipe.init, jax.random.key(0), X)
    text = jax.jit(pipe.value_and_grad).lower(shapes, X).compile().as_text()
    in_loops = [c for c in read(text) if len(c.loops) > 1 and c.kind != "collective-permute"]
    of_layers = [t for t in found.transfers if t.loop in ("forward", "backward")]
    assert len(in_loops) == sum(t.count for t in of_layers)


def test_it_is_shown(found):
    text = str(found)
    assert repr(found).startswith("<Communication of Pipeline(6 layers") and repr(found).endswith(" transfers>")
    assert "What a device sends in a step of Pipeline(6 layers" in text
    assert "forward: for each layer and micro-batch" in text and "between stages: in each tick" in text
    cells = [cell.text for cell in ElementTree.fromstring(found._repr_html_()).iter("td")]
    assert "FeedForward 1-4" in cells


def test_what_is_computed_whole_is_warned_of(make_mesh):
    mesh = make_mesh((2, 2), ("stage", "model"))
    pipe = make([nn.Dense(WIDTH), Whole(), nn.Dense(4)], mesh, balance="even")
    message = r"layer 1 \(Whole\): conv_general_dilated \(test_communication.py:\d+\) has to see whole arrays"
    with pytest.warns(UserWarning, match=message):
        pipe.communication(X)


def test_what_ends_send_that_all_stages_compute_counts_apart(make_mesh):
    """Along `stage` and along other axes: activations in, cotangents out, sums over the vocabulary."""
    split = nn.with_partitioning(nn.initializers.lecun_normal(), ("model", None))
    layers = [nn.Embed(4096, 64), nn.Dense(64), nn.Dense(64), nn.Dense(4096, kernel_init=split)]
    loss = lambda y, _: jnp.mean(jax.nn.logsumexp(y, -1))
    sizes = {"num_stages": 2, "num_microbatches": 4}
    pipe = jpipe.Pipeline(layers, loss, mesh=make_mesh((2, 2), ("stage", "model")), ends="shared", **sizes)
    found = pipe.communication(jax.ShapeDtypeStruct((8, 16), jnp.int32))
    ends = [t for t in found.transfers if t.loop == "shared ends"]
    assert {t.axes for t in ends} == {("stage",), ("model",)} and not any(t.layer for t in ends)
    assert {t.collective for t in found.transfers if t.loop == "between stages"} == {"permute"}
    activation = 2 * 16 * 64 * 4
    assert found.bytes("shared ends") > 3 * activation
    assert "shared ends: for each micro-batch, where all stages compute" in " ".join(str(found).split())


def test_on_gpus_each_transfer_counts_once_too():
    """Each run of ticks, and each trip of a loop of known length, counted by itself: up to four times as many bytes."""
    found = []
    for devices in ("cpu", "gpu"):
        with programs_for(devices):
            mesh = jpipe.make_mesh(stage=2, model=2, devices=jax.devices()[:4])
            layers = [nn.Dense(WIDTH), *[FeedForward() for _ in range(4)], nn.Dense(4)]
            pipe = make(layers, mesh, num_microbatches=4, balance=[3, 3])
            step = pipe.planner.training_step(pipe.planner.for_training(X))
            assert len(step.table.runs) == (3 if devices == "gpu" else 1)
            found.append(pipe.communication(X).transfers)
    assert found[0] == found[1] and {one.loop for one in found[0]} >= {FORWARD, BACKWARD, TICK}
