"""The model in praxis' pipeline layer (`LayerwiseShardablePipelined`): one process of two devices, GSPMD's program.

Variants are "simulated" and a checkpoint policy of praxis, such as "save_iteration_input"; or "single" for `jax.jit` of
the same functions on one device, with "accumulated" where it takes micro-batches. The layer pipelines the blocks;
embedding and head are computed before and after it, and JAX differentiates the whole.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax_functions import block, descended, loss_of_hidden, single_step, stepped
from same_model import Sizes, Tree, make_tokens, make_weights
from turns import serve, take_standard_output


def make_layer(sizes: Sizes, policy: str) -> Any:
    from praxis import base_layer, pax_fiddle
    from praxis.layers import checkpoint_policy, pipeline

    first = make_weights(sizes)["blocks"][0]
    names = [(part, name) for part in first for name in first[part]]

    class Stage(base_layer.BaseLayer):
        """Half of the blocks."""

        def setup(self) -> None:
            for i in range(sizes.layers // 2):
                for part, name in names:
                    shape = base_layer.WeightHParams(shape=first[part][name].shape)
                    self.create_variable(f"w{i}_{part}_{name}", shape)

        def __call__(self, x: Any) -> Any:
            for i in range(sizes.layers // 2):
                w: Tree = {part: {} for part in first}
                for part, name in names:
                    w[part][name] = getattr(self.theta, f"w{i}_{part}_{name}")
                x = block(x, w, sizes.heads)
            return x

    config = pax_fiddle.Config(
        pipeline.LayerwiseShardablePipelined,
        name="pipe",
        num_stages=2,
        single_stage_body=pax_fiddle.Config(Stage, name="stage"),
        num_microbatches=None,
        checkpoint_policy=checkpoint_policy.AutodiffCheckpointType(policy),
        mesh_axis_names=("stage",),
        ici_mesh_shape=[2],
    )
    config.weight_split_dims_mapping.stages = ["stage"]
    return base_layer.instantiate(config)


def stacked(weights: Tree) -> Tree:
    """Two stages' weights as the layer has them, each leaf `[2, ...]`."""
    blocks = weights["blocks"]
    count = len(blocks) // 2
    return {
        f"w{i}_{part}_{name}": np.stack([blocks[i][part][name], blocks[i + count][part][name]])
        for i in range(count)
        for part in blocks[i]
        for name in blocks[i][part]
    }


def pipelined_step(sizes: Sizes, policy: str) -> Callable[[], float]:
    from praxis import base_layer

    layer, mesh = make_layer(sizes, policy), Mesh(np.array(jax.devices()), ("stage",))
    context = base_layer.JaxContext.HParams(do_eval=False)
    split, whole = (NamedSharding(mesh, PartitionSpec(*names)) for names in (["stage"], []))

    def loss(weights: Tree, inputs: Any, targets: Any) -> Any:
        x = weights["embedding"][inputs.reshape(sizes.microbatches, -1, sizes.seq)]
        with base_layer.JaxContext.new_context(hparams=context):
            x, _ = layer.apply(
                {"params": {"body": weights["blocks"]}}, x, mutable=["aux_loss", "summaries", "non_trainable"]
            )
        return loss_of_hidden(x.reshape(*targets.shape, -1), weights["head"], targets)

    weights = make_weights(sizes)
    weights["blocks"] = stacked(weights)
    places = {"embedding": whole, "blocks": split, "head": whole}
    weights = {name: jax.device_put(weights[name], place) for name, place in places.items()}
    batch = jax.device_put(jax.tree_util.tree_map(jnp.asarray, make_tokens(sizes)), whole)

    @partial(jax.jit, donate_argnums=0)
    def train(weights: Tree, batch: Any) -> Any:
        total, gradients = jax.value_and_grad(loss)(weights, *batch)
        return descended(weights, gradients), total

    step = stepped(train, weights, batch)

    def within() -> float:
        with mesh:
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
    devices = 1 if kind == "single" else 2
    os.environ["XLA_FLAGS"] = f"--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count={devices}"
    jax.config.update("jax_platforms", "cpu")
    if kind == "single":
        serve(single_step(sizes, sizes.microbatches if "accumulated" in words else 1), answers)
    else:
        serve(pipelined_step(sizes, words[0]), answers)


if __name__ == "__main__":
    main()
