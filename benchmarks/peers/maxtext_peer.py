"""The model in MaxText's pipeline layer (`NNXPipeline`): one process of two devices, GSPMD's program.

Variants are "simulated" and "iteration_input" (remat of each iteration, MaxText's default) or "everything" (no remat);
or "single" for `jax.jit` of the same functions on one device, with "accumulated" where it takes micro-batches. The
layer pipelines the blocks; embedding and head are computed before and after it, and JAX differentiates the whole.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax_functions import block, descended, loss_of_hidden, single_step, stepped
from same_model import Sizes, Tree, make_tokens, make_weights
from turns import serve, take_standard_output

RULES = [("activation_stage", "stage"), ("layers", "stage")]
"""Which mesh axis each of MaxText's logical axes that are split here lies on."""


def make_config(sizes: Sizes, remat: bool) -> Any:
    """What the layer reads of MaxText's configuration; the rest of it asks for more packages."""
    from maxtext.common.common_types import ShardMode

    return SimpleNamespace(
        ici_pipeline_parallelism=2,
        dcn_pipeline_parallelism=1,
        pipeline_delay_activation_forwarding=False,
        micro_batch_size_to_train_on=sizes.batch,
        num_pipeline_microbatches=sizes.microbatches,
        num_pipeline_repeats=1,
        max_target_length=sizes.seq,
        emb_dim=sizes.width,
        shard_mode=ShardMode.AUTO,
        debug_sharding=False,
        logical_axis_rules=RULES,
        scan_layers=False,
        scan_pipeline_iterations=True,
        set_remat_policy_on_pipeline_iterations=remat,
        remat_policy="full",
        pipeline_fsdp_ag_once=False,
        pipeline_fsdp_ag_per_repeat=False,
    )


def make_pipeline(sizes: Sizes, remat: bool, mesh: Mesh) -> Any:
    """The layer, with the weights of all blocks in it, each leaf `[2, ...]`."""
    from flax import nnx
    from maxtext.layers.pipeline import create_nnx_pipeline

    blocks = make_weights(sizes)["blocks"]
    count = len(blocks) // 2
    names = [(part, name) for part in blocks[0] for name in blocks[0][part]]

    class Stage(nnx.Module):
        """Half of the blocks."""

        def __init__(self) -> None:
            for i in range(count):
                for part, name in names:
                    shape = blocks[0][part][name].shape
                    setattr(
                        self, f"w{i}_{part}_{name}", nnx.Param(jnp.zeros(shape), sharding_names=(None,) * len(shape))
                    )

        def __call__(self, x: Any, *_: Any) -> Any:
            for i in range(count):
                w: Tree = {part: {} for part in blocks[0]}
                for part, name in names:
                    w[part][name] = getattr(self, f"w{i}_{part}_{name}").get_value()
                x = block(x, w, sizes.heads)
            return x

    with mesh:
        pipe = create_nnx_pipeline(make_config(sizes, remat), lambda rngs: Stage(), mesh, rngs=nnx.Rngs(0))
    for i in range(count):
        for part, name in names:
            both = np.stack([blocks[i][part][name], blocks[i + count][part][name]])
            getattr(pipe.layers, f"w{i}_{part}_{name}").set_value(jnp.asarray(both))
    return pipe


def pipelined_step(sizes: Sizes, remat: bool) -> Callable[[], float]:
    from flax import linen as nn
    from flax import nnx

    mesh = Mesh(np.array(jax.devices()), ("stage",))
    with mesh, nn.logical_axis_rules(RULES):
        graph, blocks = nnx.split(make_pipeline(sizes, remat, mesh))
    split, whole = (NamedSharding(mesh, PartitionSpec(*names)) for names in (["stage"], []))

    def loss(weights: Tree, inputs: Any, targets: Any) -> Any:
        x = weights["embedding"][inputs]
        x = nnx.merge(graph, weights["blocks"])(x, None, None, True)
        return loss_of_hidden(x, weights["head"], targets)

    weights = make_weights(sizes) | {"blocks": blocks}
    places = {"embedding": whole, "blocks": split, "head": whole}
    weights = {name: jax.device_put(weights[name], place) for name, place in places.items()}
    batch = jax.device_put(make_tokens(sizes), whole)

    @partial(jax.jit, donate_argnums=0)
    def train(weights: Tree, batch: Any) -> Any:
        total, gradients = jax.value_and_grad(loss)(weights, *batch)
        return descended(weights, gradients), total

    step = stepped(train, weights, batch)

    def within() -> float:
        with mesh, nn.logical_axis_rules(RULES):
            return step()

    return within


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("variant")
    parser.add_argument("--index", type=int, default=0, help="of this process; there is one")
    parser.add_argument("--port", type=int, help="not used")
    Sizes.add_arguments(parser)
    options = parser.parse_args()
    answers = take_standard_output()
    sizes, (kind, *words) = Sizes.of(options), options.variant.split(",")
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1 if kind == "single" else 2)
    if kind == "single":
        serve(single_step(sizes, sizes.microbatches if "accumulated" in words else 1), answers)
    else:
        serve(pipelined_step(sizes, words[0] == "iteration_input"), answers)


if __name__ == "__main__":
    main()
