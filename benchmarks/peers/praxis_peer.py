"""The model in praxis' pipeline layer (`LayerwiseShardablePipelined`): one process of two devices, GSPMD's program.

Variants are "simulated" and a checkpoint policy of praxis, such as "save_iteration_input"; or "single" for `jax.jit` of
the same functions on one device, with "accumulated" where it takes micro-batches. The layer pipelines the blocks;
embedding and head are computed before and after it, and JAX differentiates the whole.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax_functions import loss_of_hidden, run_stage, serve_variant, stacked, stacked_step
from same_model import Sizes, Tree, make_weights


def make_layer(sizes: Sizes, policy: str, blocks: list[Tree]) -> Any:
    from praxis import base_layer, pax_fiddle
    from praxis.layers import checkpoint_policy, pipeline

    class Stage(base_layer.BaseLayer):
        """Half of the blocks."""

        def setup(self) -> None:
            for name, (first, _) in stacked(blocks).items():
                self.create_variable(name, base_layer.WeightHParams(shape=first.shape))

        def __call__(self, x: Any) -> Any:
            return run_stage(x, blocks, lambda name: getattr(self.theta, name), sizes.heads)

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


def pipelined_step(sizes: Sizes, policy: str) -> Callable[[], float]:
    from praxis import base_layer

    blocks, mesh = make_weights(sizes)["blocks"], Mesh(np.array(jax.devices()), ("stage",))
    layer, context = make_layer(sizes, policy, blocks), base_layer.JaxContext.HParams(do_eval=False)
    others = ["aux_loss", "summaries", "non_trainable"]

    def loss(weights: Tree, inputs: Any, targets: Any) -> Any:
        x = weights["embedding"][inputs.reshape(sizes.microbatches, -1, sizes.seq)]
        with base_layer.JaxContext.new_context(hparams=context):
            x, _ = layer.apply({"params": {"body": weights["blocks"]}}, x, mutable=others)
        return loss_of_hidden(x.reshape(*targets.shape, -1), weights["head"], targets)

    return stacked_step(sizes, loss, stacked(blocks), mesh)


if __name__ == "__main__":
    serve_variant(__doc__, pipelined_step)
