"""What `test_llama_example` runs in a worker: `examples/llama.py` beside google-tunix's own Llama 3.

tunix is imported in functions only: it takes seconds, and changes a setting of Flax for the whole process.
"""

import contextlib
import importlib.util
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from timed import alive

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZE, STEPS = 8, 12
TOLERANCES = {"float64": 1e-12, "float32": 1e-5}
"""Of a leaf's largest value. Sums of some hundred terms in another order, and a few layers of them."""


def load_example(name: str = "llama") -> Any:
    """`examples/llama.py`, or another, under a name that no other module has."""
    with mock.patch("sys.path", [str(EXAMPLES), *sys.path]):
        spec = importlib.util.spec_from_file_location(f"{name}_example", EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
    return example


class Instead:
    """A module with other things under some names; the rest is what it has when asked, as qwix replaces functions."""

    def __init__(self, module: ModuleType, **names: Any):
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextlib.contextmanager
def wide(example: Any):
    """tunix's code as it is, but computing in float64 where it says float32 or leaves the dtype to `nnx.Linear`."""
    linear = partial(nnx.Linear, param_dtype=jnp.float64)
    with (
        jax.enable_x64(True),
        mock.patch.object(example.llama, "jnp", Instead(jnp, float32=jnp.float64)),
        mock.patch.object(example.llama, "nnx", Instead(nnx, Linear=linear)),
    ):
        yield


def check(shape: list[int], dtype: str, tied: bool, chosen: dict[str, Any]) -> int:
    """Loss and every gradient leaf on a mesh (stage, fsdp, tp) against tunix's model and loss; how many there are."""
    example = load_example()
    with wide(example) if dtype == "float64" else contextlib.nullcontext():
        config = replace(example.TINY, weight_tying=tied, embed_dim=16, hidden_dim=32, head_dim=8, vocab_size=32)
        random = np.random.default_rng(0)
        mask = np.arange(STEPS) < random.integers(4, STEPS + 1, SIZE)[:, None]
        batch = example.make_batch(random.integers(0, config.vocab_size, mask.shape).astype(np.int32), mask)

        alive("tunix's model")
        model = example.make_model(config)
        state = jax.tree.map(lambda x: x + 0.1 * random.normal(size=x.shape).astype(x.dtype), nnx.state(model))
        nnx.update(model, state)  # unlike initial values, in norms too
        tree = example.tree_of(model)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(tree)} == {dtype}
        loss, grads = jax.device_get(nnx.value_and_grad(example.tunix_loss)(model, **batch))
        tokens = mask[:, 1:].sum()
        exact = (tokens + 1e-8) / tokens  # tunix divides by a little more
        wanted = jax.tree.map(lambda x: x * exact, (loss, {"params": nnx.to_pure_dict(grads)}))

        alive("the pipeline")
        mesh = Mesh(np.asarray(jax.devices()[: np.prod(shape)]).reshape(shape), ("stage", "fsdp", "tp"))
        pipe = example.make_pipeline(config, num_stages=shape[0], num_microbatches=4, mesh=mesh, **chosen)
        variables = pipe.from_model_variables(tree, batch)
        (loss, _), grads = jax.device_get(pipe.value_and_grad(variables, batch))
        got = loss, jax.device_get(pipe.model_variables({"params": grads}))
        differences = jax.tree_util.tree_leaves_with_path(jax.tree.map(example.difference, got, wanted))
        wrong = {jax.tree_util.keystr(path): d for path, d in differences if not d <= TOLERANCES[dtype]}
        assert not wrong, wrong
    return len(differences)


def printed(*arguments: str, name: str = "llama") -> str:
    """What the example prints, called with these arguments."""
    example = load_example(name)
    example.console.width = 120
    joined = mock.patch.object(sys.modules["cluster"], "join", lambda *_: None)  # the devices are there
    with mock.patch("sys.argv", [f"{name}.py", *arguments]), joined, example.console.capture() as text:
        example.main()
    return text.get()


def lowered(*arguments: str) -> list[Any]:
    """Lowers the step of an 8B with fewer blocks for eight simulated devices; its layers by stage, bytes a device."""
    example = load_example()
    options = example.parse_options(["--compile", "", *arguments])
    config = replace(example.llama.ModelConfig.llama3p1_8b(), num_layers=options.layers)
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2, 2), ("stage", "fsdp", "tp"))
    pipe, _ = example.lower(config, mesh, options)
    variables = pipe.abstract_state(example.batch_shapes(16, 2048), example.optax.sgd(1.0)).variables
    parts = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(variables)]
    return [example.layers_by_stage(pipe), sum(parts)]
