"""Examples, compiled for 16 chips of TPU v5e that aren't there: stages, data and tensor parallelism at once.

Layers, losses, optimisers and steps are the examples' own. What a CPU can't tell: whether the TPU's compiler takes the
programs, what they hold on a chip, and which collectives are left when it is done.
"""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import digits
import generate
import jax
import jax.numpy as jnp
import lm
import optax
import pytest
import train
from jax.sharding import Mesh

import jpipe
from collectives import axes_of, by_the_executor, in_loop, intruders, read
from tpu_program import compile_with_text, needs_tpu_compiler, tpu_devices

pytestmark = [
    pytest.mark.slow,
    needs_tpu_compiler,
    pytest.mark.filterwarnings("ignore:layer .* (alone takes|lies in a loop):UserWarning"),  # small models, badly cut
]

EXAMPLES = Path(__file__).parents[2] / "examples"
STAGES, DATA, MODEL = 4, 2, 2
CHIP = 16 * 10**9
"""Bytes of a v5e."""


Example = tuple[jpipe.Pipeline, dict[str, jax.ShapeDtypeStruct], optax.GradientTransformation]
"""A pipeline on the mesh of 16 chips, the shapes of a batch, the optimiser."""


# --- the examples -----------------------------------------------------------------------------------------------------


def of_lm(mesh: Mesh) -> Example:
    options = lm.parse_options(["--layers", "6"])
    tokens = integers(options.batch, options.seq)
    pipe = lm.make_pipeline(lm.make_model(options), options, mesh)
    return pipe, {"inputs": tokens, "targets": tokens}, lm.make_optimizer(options)


def of_generate(mesh: Mesh) -> Example:
    options = generate.parse_options(["--layers", "6"])
    tokens = integers(options.batch, options.seq)
    batch = {"inputs": tokens, "targets": tokens}
    return generate.make_pipeline(options, mesh), batch, lm.make_optimizer(options)


def of_train(mesh: Mesh) -> Example:
    options = Namespace(**{name: default for name, (default, _) in train.OPTIONS.items()})
    tokens = integers(options.batch, options.seq)
    pipe = train.make_pipeline(options, mesh)
    return pipe, {"inputs": tokens, "targets": tokens}, train.make_optimizer(options)


def of_digits(mesh: Mesh) -> Example:
    options = digits.parse_options([])
    pipe, tx = digits.make_pipeline(options, mesh), digits.make_optimizer(100, options.lr)
    images = jax.ShapeDtypeStruct((options.batch, 8, 8, 1), jnp.float32)
    return pipe, {"inputs": images, "targets": integers(options.batch)}, tx


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


TABLE: dict[str, Callable[[Mesh], Example]] = {
    "lm": of_lm,
    "generate": of_generate,
    "train": of_train,
    "digits": of_digits,
}
"""From the mesh to an example, for each program in `examples`; `test_models` has those in `examples/models`."""

ELSEWHERE = {"__init__", "cluster", "names", "precision", "schedules", "concepts", "pipedream", "llama"} | {
    "linen_loop", "nnx_loop", "published_orders", "transfer", "translate", "translation_study", "dit_stream",
    "llama_decoding", "lora",
}  # fmt: skip
"""What has no model: helpers, and scripts for pictures; what `test_llama_example` compiles, with its package; and what
runs a model that is in the table, or in a loop of its own."""


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jpipe.make_mesh(stage=STAGES, data=DATA, model=MODEL, devices=tpu_devices("v5e:4x4"))


@pytest.fixture(autouse=True)
def usual_promotion():
    """The examples' modules and optimisers mix dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_no_example_is_missing():
    assert {file.stem for file in EXAMPLES.glob("*.py")} - ELSEWHERE == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_the_training_step_compiles(name, mesh):
    pipe, batch, tx = TABLE[name](mesh)
    step = jax.jit(pipe.train_step, donate_argnums=0)
    compiled, text = compile_with_text(step.lower(pipe.abstract_state(batch, tx), batch))
    check(compiled, text, mesh)
    assert any(axes_of(c, mesh) == ("data",) and not in_loop(c) for c in read(text)), "gradients are reduced"


@pytest.mark.parametrize("name", TABLE)
def test_evaluation_compiles(name, mesh):
    pipe, batch, tx = TABLE[name](mesh)
    variables = pipe.abstract_state(batch, tx).variables
    check(*compile_with_text(jax.jit(pipe.evaluate).lower(variables, batch)), mesh)


def check(compiled: Any, text: str, mesh: Mesh) -> None:
    """It fits, stages send to their neighbours, and in loops nothing else goes from stage to stage."""
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert 0 < held + memory.temp_size_in_bytes < CHIP
    inside = list(filter(in_loop, read(text)))
    assert any(by_the_executor(c, mesh) for c in inside)
    assert any(axes_of(c, mesh) == ("model",) for c in inside), "layers work on split weights"
    assert [str(c) for c in intruders(text, mesh)] == []
