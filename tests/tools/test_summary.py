"""A pipeline as a table: before a batch was seen and after, in text and in HTML; the note where there is no room."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
import small_pipeline
from html_tables import cells
from jpipe.processes.tables import bytes_in_words
from jpipe.tools.chips import parse_topology
from jpipe.tools.memory_model import predict_memory
from jpipe.tools.summary import PAGE, notes_on_room
from small_pipeline import dense
from terminals import soon as soon
from terminals import terminal as terminal
from tpu_program import needs_tpu_compiler

BATCH = {"inputs": np.ones((4, 3), np.float32)}


def make(**options) -> jpipe.Pipeline:
    layers = [nn.Dense(4), nn.Dense(4), nn.Dense(4), lambda x: jnp.tanh(x)]
    return jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), num_stages=2, num_microbatches=2, **options)


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_pipeline_before_and_after_a_batch(num_chunks):
    schedule = "interleaved" if num_chunks > 1 else "1f1b"
    pipe = make(num_chunks=num_chunks, schedule=schedule)
    header = ["stage", "chunk"][:num_chunks]
    before = cells(pipe._repr_html_())
    assert before[0] == [*header, "in flight", "devices"]
    assert [row[0] for row in before[1:]] == ["0", "1"] * num_chunks
    assert "the layers are cut when a batch is seen (balance='flops')" in str(pipe)
    pipe.abstract_state(BATCH, tx=optax.sgd(0.1))
    after = cells(pipe._repr_html_())
    assert after[0] == [*header, "layers", "what", "cost", "parameters", "in flight", "devices"]
    assert len(after) == 1 + 2 * num_chunks
    column = {name: [row[i] for row in after[1:]] for i, name in enumerate(after[0])}
    assert sum(int(number.replace(",", "")) for number in column["parameters"]) == 16 + 20 + 20
    assert column["devices"] == ["cpu:0", "cpu:1"] * num_chunks
    assert column["in flight"] == list(map(str, jpipe.simulate(pipe.schedule).peak_in_flight)) * num_chunks
    assert "\nbubble: " in str(pipe) and "% by the layers' costs; " in str(pipe)
    for line, row in zip(str(pipe).splitlines()[1:], after, strict=False):
        assert line.split() == " ".join(row).split()
    assert repr(pipe) == str(pipe).splitlines()[0] and "\n" not in repr(pipe)


def test_names_are_escaped():
    pipe = make(balance="even")
    html = pipe._repr_html_()
    assert "lambda" in html and "<lambda>" not in html and "&lt;lambda&gt;" in html
    assert "<lambda>" in str(pipe)
    assert cells(html)[0] == ["stage", "layers", "what", "in flight", "devices"]


def test_what_a_device_holds():
    """In words what `jpipe.tools.memory_model` counts; the bubble is the simulator's, of these costs."""
    table = jpipe.Shared(nn.Embed(32, 4))
    layers = [table, *[nn.Dense(4) for _ in range(5)], table.using("attend")]
    costs, sizes = [1.0, 2, 2, 1, 2, 1, 2.5], {"num_stages": 2, "num_microbatches": 4}
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), balance=costs, **sizes)
    variables = pipe.init(jax.random.key(0), np.ones((4, 3), np.int32))
    assert pipe.partition.counts == (4, 3)
    device = pipe.mesh.devices.flat[1]
    held = [s.data for a in jax.tree.leaves(variables) for s in a.addressable_shards if s.device == device]
    words = " ".join(str(pipe).split())
    assert f"each device holds {sum(a.size for a in held)} parameters ({sum(a.nbytes for a in held)} bytes): " in words
    memory = predict_memory(pipe.planner, np.ones((4, 3), np.int32), optax.sgd(1.0))[0]
    assert f"a training step holds {bytes_in_words(memory.total)} a device (predicted, without the" in words
    assert f"gradients {bytes_in_words(memory['gradients'])}" in words
    after = cells(pipe._repr_html_())
    parameters = [row[after[0].index("parameters")] for row in after[1:]]
    assert parameters == [str(32 * 4 + 3 * 20), str(2 * 20)]
    bubble = jpipe.simulate(pipe.schedule, [2.0, 5.5 / 3], [4.0, 11 / 3]).bubble_fraction
    assert f"bubble: {bubble:.1%} by the layers' costs; 20.0% if stages take equally long" in words


# --- no room: errors that XLA raises, and such as it would ------------------------------------------------------------


ROWS = np.ones((8, 4), np.float32)
TX = optax.sgd(1e-3, momentum=0.9)
FULL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes."


def small(layers=None, **options):
    return small_pipeline.make(layers, lambda y, _: jnp.mean(y**2), **options)


class Huge(nn.Module):
    """A layer that needs 2**41 numbers at once, if it is told to."""

    hungry: bool = True

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(8)(x)
        if not self.hungry:
            return y
        wide = jax.lax.stop_gradient(y)[:, :, None] * jnp.arange(2.0**38)
        return y + jnp.sort(wide, -1)[..., 0]


def refuse(*_, **__):
    raise jax.errors.JaxRuntimeError(FULL)


def notes_of(error):
    return getattr(error, "__notes__", [])


@pytest.mark.parametrize("call", ["train_step", "value_and_grad", "evaluate", "apply"])
def test_the_first_call_that_finds_no_room_says_what_it_holds(terminal, soon, call):
    """A real error: XLA asks for 128 TiB. On a terminal a first step waits for its result, and raises in place."""
    pipe = small([dense(8), Huge(), dense(8), dense(8)])
    state = pipe.create_state(jax.random.key(0), ROWS, TX)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        getattr(pipe, call)(state if call == "train_step" else state.variables, ROWS)
    (text,) = notes_of(caught.value)
    said, last = text.splitlines()
    if call == "train_step":
        held = predict_memory(pipe.planner, ROWS, TX)[0]
        assert held["work"] > 2**45
        total, work = bytes_in_words(held.total), bytes_in_words(held["work"])
        assert said.startswith(f"a training step holds {total} a device (predicted): work {work}, ")
    trains = call in ("train_step", "value_and_grad")
    assert said.startswith("a training step holds " if trains else "each device holds ")
    assert last.endswith(f": {PAGE}")


def test_initialisation_and_the_optimisers_state_have_it_too(monkeypatch):
    pipe = small()
    monkeypatch.setattr("jpipe.pipeline.make_opt_state", refuse)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        pipe.create_state(jax.random.key(0), ROWS, TX)
    assert "optimizer 160 bytes" in notes_of(caught.value)[0]
    monkeypatch.setattr("jpipe.pipeline.programs.init_variables", refuse)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        small().init(jax.random.key(0), ROWS)
    assert notes_of(caught.value)[-1].startswith("each device holds ")


def test_other_errors_and_traced_calls_get_none():
    pipe = small()
    pipe.init(jax.random.key(0), ROWS)

    def call(error, arguments=ROWS):
        with pytest.raises(type(error)) as caught, notes_on_room(pipe.planner, arguments, ROWS, TX):
            raise error
        assert caught.value is error
        return notes_of(error)

    assert call(jax.errors.JaxRuntimeError(FULL))
    assert not call(jax.errors.JaxRuntimeError("INVALID_ARGUMENT: no such thing"))
    assert not call(ValueError(FULL))

    def traced(x):
        assert not call(jax.errors.JaxRuntimeError(FULL), x)
        return x

    jax.make_jaxpr(traced)(ROWS)


@needs_tpu_compiler
def test_the_tpu_compilers_refusal_is_known():
    """As it is raised at the first call on a TPU, here by compiling alone, which is the user's own call."""
    mesh = jpipe.make_mesh(stage=2, devices=parse_topology("v5e:2x2").devices()[:2])
    pipe = small([dense(2**15) for _ in range(4)], mesh=mesh)
    batch = jax.ShapeDtypeStruct((8, 2**15), jnp.float32)
    state = pipe.abstract_state(batch, TX)
    lowered = jax.jit(pipe.train_step, donate_argnums=0).lower(state, batch)
    full = pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED")
    with full as caught, notes_on_room(pipe.planner, state, batch, TX):
        lowered.compile()
    (text,) = notes_of(caught.value)
    assert re.match(r"a training step holds 2\d\.\d GiB a device", text)
    for part in ("parameters", "optimizer", "gradients"):
        assert f"{part} 8.0 GiB" in text
