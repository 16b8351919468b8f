"""Sends shared weights to all stages at the start of a step, and adds up their gradients at its end.

The stage of a shared layer's first use holds its parameters. Each stage adds gradients of its own uses up in an
accumulator of its own; here these meet, by one `psum` over the stages for each leaf.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jpipe.arrays.in_place import Index, when
from jpipe.execution.stage import BackwardWork, Stage
from jpipe.memory.storage import Buffers
from jpipe.mesh.axes import AXIS
from jpipe.mesh.specs import on_all_stages
from jpipe.model.groups import WEIGHTS
from jpipe.planning.step import Step
from jpipe.types import Leaf


def send_shared(step: Step, variables: dict[str, Buffers], device: Index) -> dict[int, dict[str, list[Leaf]]]:
    """Weights that several stages use, by set of variables and collection, as layers use them.

    The stage that holds them sends them to all; of those that all stages compute with together, each has its part.
    """

    def sent(collection: str, v: int) -> list[Leaf]:
        storage = step.storages[collection]
        known, leaves = storage.record_types[v], storage.read(variables[collection], v, 0)
        mine = known.devices[0] == device  # such a set has one instance
        # JAX sums bools as integers, so they are cast back.
        to_all = lambda a: jax.lax.psum(jnp.where(mine, a, jnp.zeros_like(a)), AXIS).astype(a.dtype)
        return [a if on_all_stages(spec) else to_all(a) for a, spec in zip(leaves, known.specs, strict=True)]

    shared = [v for v, known in enumerate(step.model.variable_sets) if known.shared or v in step.ends.sets]
    return {v: {name: sent(name, v) for name in step.collections(*WEIGHTS)} for v in shared}


def sum_shared_gradients(stage: Stage, work: BackwardWork) -> Buffers:
    """This device's buffers of gradients, with those of the shared parameters that it holds, summed over the stages.

    Args:
      stage: this device.
      work: its sums of gradients, and those of its uses of shared parameters.
    """
    gradients = work.gradients
    storage = stage.step.storages["params"]
    for v, leaves in work.shared_gradients.items():
        total = [jax.lax.psum(leaf, AXIS) for leaf in leaves]
        mine = storage.record_types[v].devices[0] == stage.device
        add = lambda total, buffers, v=v: storage.add(buffers, v, 0, total)
        gradients = when(mine, total, add, gradients)
    return gradients
