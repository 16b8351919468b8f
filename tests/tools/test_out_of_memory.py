"""The note on an error of a device without room: by errors that XLA raises, and by such as it would."""

import re
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from jpipe.processes.tables import bytes_in_words
from jpipe.tools import out_of_memory
from jpipe.tools.chips import parse_topology
from jpipe.tools.memory_model import predict_host_memory, predict_memory
from jpipe.tools.out_of_memory import PAGE, note, notes_on_room, remedies
from small_pipeline import dense
from terminals import soon as soon
from terminals import terminal as terminal
from tpu_program import needs_tpu_compiler

BATCH = np.ones((8, 4), np.float32)
TX = optax.sgd(1e-3, momentum=0.9)
FULL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes."


def make(layers=None, **options):
    options = {"num_stages": 2, "num_microbatches": 2, "balance": "even"} | options
    return jpipe.Pipeline(layers or [dense() for _ in range(4)], lambda y, _: jnp.mean(y**2), **options)


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


def test_bytes_on_the_host_are_named():
    pipe = make(offload="optimizer", mesh=jpipe.make_mesh(stage=2, devices=parse_topology("h100:2").stand_ins()))
    size = predict_host_memory(pipe.planner, BATCH, TX).total
    assert size > 0
    assert f"  and {bytes_in_words(size)} of its host; there JAX takes at most 64 GiB" in note(pipe.planner, BATCH, TX)
    assert "of its host" not in note(make().planner, BATCH, TX)


def test_the_first_step_that_finds_no_room_says_what_it_holds(terminal, soon):
    """A real error: XLA asks for 128 TiB. On a terminal a first step waits for its result, and raises in place."""
    pipe = make([dense(8), Huge(), dense(8), dense(8)])
    state = pipe.create_state(jax.random.key(0), BATCH, TX)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        pipe.train_step(state, BATCH)
    (text,) = notes_of(caught.value)
    held = predict_memory(pipe.planner, BATCH, TX)
    assert held.work > 2**45
    first, largest, *_, last = text.splitlines()
    assert first == f"By jpipe's model of memory a step of training takes {bytes_in_words(held.total)} of each device:"
    assert largest.startswith(f"  work {bytes_in_words(held.work)}; smaller by more than 2 micro-batches, ends=")
    assert last == f"What each of these costs: {PAGE}"


@pytest.mark.parametrize("call", ["value_and_grad", "evaluate", "apply"])
def test_so_do_other_calls(terminal, soon, call):
    pipe = make([dense(8), Huge(), dense(8), dense(8)])
    variables = pipe.init(jax.random.key(0), BATCH)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        getattr(pipe, call)(variables, BATCH)
    (text,) = notes_of(caught.value)
    trains = call == "value_and_grad"
    assert text.startswith("By jpipe's model of memory a step" if trains else "The variables take ")
    assert ("\n  and the batch, the outputs, activations" in text) == (not trains)
    assert text.endswith(PAGE)


def test_an_error_of_a_program_that_is_refused_keeps_its_type_and_words(monkeypatch):
    pipe = make()
    state = pipe.create_state(jax.random.key(0), BATCH, TX)
    monkeypatch.setattr(pipe._train_steps, "of", lambda tx: (tx, refuse))
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(FULL)) as caught:
        pipe.train_step(state, BATCH)
    (text,) = notes_of(caught.value)
    held = predict_memory(pipe.planner, BATCH, TX)
    sizes = sorted((size, name) for name, size in held.items() if size)[: -out_of_memory.MOST - 1 : -1]
    shown = [line for line in text.splitlines() if line.startswith("  ")]
    assert len(shown) == len(sizes) == out_of_memory.MOST
    for line, (size, name) in zip(shown, sizes, strict=True):
        assert line.startswith(f"  {name.replace('_', ' ')} {bytes_in_words(size)}; smaller by ")


def test_initialisation_and_the_optimisers_state_have_it_too(monkeypatch):
    pipe = make()
    monkeypatch.setattr("jpipe.pipeline.make_opt_state", refuse)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        pipe.create_state(jax.random.key(0), BATCH, TX)
    assert "\n  optimizer 160 bytes; smaller by " in notes_of(caught.value)[0]
    monkeypatch.setitem(vars(pipe), "_jit_init", refuse)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        pipe.init(jax.random.key(0), BATCH)
    assert notes_of(caught.value)[0].startswith("The variables take ")


def test_other_errors_and_traced_calls_get_none():
    pipe = make()
    pipe.init(jax.random.key(0), BATCH)

    def call(error, arguments=BATCH):
        with pytest.raises(type(error)) as caught, notes_on_room(pipe.planner, arguments, BATCH, TX):
            raise error
        assert caught.value is error
        return notes_of(error)

    assert call(jax.errors.JaxRuntimeError(FULL))
    assert not call(jax.errors.JaxRuntimeError("INVALID_ARGUMENT: no such thing"))
    assert not call(ValueError(FULL))

    def traced(x):
        assert not call(jax.errors.JaxRuntimeError(FULL), x)
        return x

    jax.make_jaxpr(traced)(BATCH)


def test_a_fault_of_the_note_hides_nothing(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(out_of_memory, "predict_memory", broken)
    error = jax.errors.JaxRuntimeError(FULL)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught, notes_on_room(make().planner, BATCH, BATCH, TX):
        raise error
    assert caught.value is error and not notes_of(error) and error.__context__ is None


def test_nothing_is_looked_at_while_nothing_fails(monkeypatch):
    monkeypatch.setattr(out_of_memory, "note", refuse)
    monkeypatch.setattr(out_of_memory, "is_traced", refuse)
    with notes_on_room(None, None):
        pass


def test_remedies_are_those_that_are_not_chosen_yet():
    mesh = jpipe.make_mesh(stage=2, data=2, devices=jax.devices()[:4])
    found = remedies(make(mesh=mesh, schedule="gpipe").planner.request)
    assert found["residuals"][:2] == ['schedule="1f1b"', "more than 2 micro-batches"]
    assert found["optimizer"] == ["shard_over=('data',)", 'ends="spread"', "more than 2 stages"]
    chosen = {"mesh": mesh, "shard_over": ("data",), "ends": "shared", "remat": "full"}
    found = remedies(make(**chosen).planner.request)
    assert found["residuals"] == ["more than 2 micro-batches"]
    assert found["optimizer"] == ["more than 2 stages"]
    assert found["gradients"] == ['gather="use"', "more than 2 stages"]


def test_the_hosts_are_named_where_there_are_some_and_what_goes_there_is_not_there_yet():
    said = lambda options: [
        [text for text in remedies(make(**options).planner.request)[part] if "offload" in text]
        for part in ("residuals", "optimizer")
    ]
    assert said({}) == [[], []], "CPUs have no other memory"
    there = {"mesh": jpipe.make_mesh(stage=2, devices=parse_topology("h100:2").stand_ins())}
    assert said(there) == [['offload="residuals"'], ['offload="optimizer"']]
    assert said(there | {"remat": "full"}) == [[], ['offload="optimizer"']]
    assert said(there | {"offload": ("boundaries", "optimizer")}) == [[], []]


@pytest.mark.parametrize(
    ("remat", "schedule", "said"),
    [
        ("none", "1f1b", ['remat="layer"']),
        (jax.checkpoint_policies.dots_saveable, "1f1b", ['remat="layer"']),
        ("stage", "1f1b", ['remat="full"']),
        ("none", "zero_bubble", ['remat="layer"']),
        ("layer", "zero_bubble", []),
    ],
)
def test_no_remedy_is_one_that_the_schedule_refuses(remat, schedule, said):
    found = remedies(make(remat=remat, schedule=schedule).planner.request)["residuals"]
    assert [text for text in found if "remat" in text] == said


def test_every_part_has_remedies():
    """A word of `Pipeline`'s that isn't one would be refused there."""
    pipe = make(schedule="gpipe")
    found = remedies(pipe.planner.request)
    parts = set(predict_memory(pipe.planner, BATCH, TX)) - {"other_variables"}
    assert parts | {"others"} == found.keys() and all(found.values())
    words = {text for texts in found.values() for text in texts if re.fullmatch(r'\w+="\w+"', text)}
    assert {"gather", "ends", "cast", "schedule"} - {"gather"} <= {text.partition("=")[0] for text in words}
    for text in words:
        name, _, value = text.partition("=")
        make(**{name: value.strip('"')})


def test_other_collections_are_named():
    pipe = make([dense(), nn.BatchNorm(use_running_average=False), dense(), dense()])
    pipe.init(jax.random.key(0), BATCH)
    assert re.search(r"\n  batch stats \d+ bytes; smaller by more than 2 stages\n", note(pipe.planner))


@pytest.mark.parametrize(("stats", "room"), [(None, 16 * 2**30), ({"bytes_limit": 5 * 2**30}, 5 * 2**30)])
def test_the_room_of_a_device_is_named_where_it_is_known(monkeypatch, stats, room):
    device = SimpleNamespace(device_kind="TPU v5 lite", memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    other = SimpleNamespace(device_kind="TPU v5 lite")  # another process's: it tells nothing
    assert out_of_memory._room(SimpleNamespace(devices=np.array([other, device]))) == room
    assert out_of_memory._room(SimpleNamespace(devices=np.array([other]))) == 16 * 2**30
    monkeypatch.undo()
    pipe = make()
    pipe.init(jax.random.key(0), BATCH)
    monkeypatch.setattr(out_of_memory, "_room", lambda mesh: room)
    has = f"which has {room >> 30}.0 GiB"
    assert note(pipe.planner).startswith(f"The variables take 160 bytes of each device, {has}:\n")


@needs_tpu_compiler
def test_the_tpu_compilers_refusal_is_known():
    """As it is raised at the first call on a TPU, here by compiling alone, which is the user's own call."""
    mesh = jpipe.make_mesh(stage=2, devices=parse_topology("v5e:2x2").devices()[:2])
    pipe = make([dense(2**15) for _ in range(4)], mesh=mesh)
    batch = jax.ShapeDtypeStruct((8, 2**15), jnp.float32)
    state = pipe.abstract_state(batch, TX)
    lowered = jax.jit(pipe.train_step, donate_argnums=0).lower(state, batch)
    full = pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED")
    with full as caught, notes_on_room(pipe.planner, state, batch, TX):
        lowered.compile()
    (text,) = notes_of(caught.value)
    assert re.match(r"By jpipe's model of memory a step of training takes 2\d\.\d GiB of each device", text)
    for part in ("parameters", "optimizer", "gradients"):
        assert f"\n  {part} 8.0 GiB; smaller by " in text
