"""The model in MaxText's pipeline layer (`NNXPipeline`): one process of two devices, GSPMD's program.

Variants are "simulated" and "iteration_input" (remat of each iteration, MaxText's default) or "everything" (no remat);
or "single" for `jax.jit` of the same functions on one device, with "accumulated" where it takes micro-batches. The
layer pipelines the blocks; embedding and head are computed before and after it, and JAX differentiates the whole.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax_functions import loss_of_hidden, run_stage, serve_variant, stacked, stacked_step
from same_model import Sizes, Tree, make_weights

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
    weights = stacked(blocks)

    class Stage(nnx.Module):
        """Half of the blocks."""

        def __init__(self) -> None:
            for name, (first, _) in weights.items():
                setattr(self, name, nnx.Param(jnp.zeros(first.shape), sharding_names=(None,) * first.ndim))

        def __call__(self, x: Any, *_: Any) -> Any:
            return run_stage(x, blocks, lambda name: getattr(self, name).get_value(), sizes.heads)

    with mesh:
        pipe = create_nnx_pipeline(make_config(sizes, remat), lambda rngs: Stage(), mesh, rngs=nnx.Rngs(0))
    for name, both in weights.items():
        getattr(pipe.layers, name).set_value(jnp.asarray(both))
    return pipe


def pipelined_step(sizes: Sizes, remat: str) -> Callable[[], float]:
    from flax import linen as nn
    from flax import nnx

    mesh, rules = Mesh(np.array(jax.devices()), ("stage",)), partial(nn.logical_axis_rules, RULES)
    with mesh, rules():
        graph, blocks = nnx.split(make_pipeline(sizes, remat == "iteration_input", mesh))

    def loss(weights: Tree, inputs: Any, targets: Any) -> Any:
        x = weights["embedding"][inputs]
        x = nnx.merge(graph, weights["blocks"])(x, None, None, True)
        return loss_of_hidden(x, weights["head"], targets)

    return stacked_step(sizes, loss, blocks, mesh, rules)


if __name__ == "__main__":
    serve_variant(__doc__, pipelined_step)
