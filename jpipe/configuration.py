"""Lists all that decides which program a step is, and has processes compare it (`Agreement`) before they compute.

Two processes with other programs would wait for each other's transfers for ever.
"""

from __future__ import annotations

import hashlib
from typing import TypeGuard

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from jpipe.layers.base import describe
from jpipe.model.remat import MODES, Remat
from jpipe.planning.plan import Plan
from jpipe.planning.planner import Planner
from jpipe.processes.agreement import check_agreement
from jpipe.terminal.first_calls import followed
from jpipe.terminal.progress import task
from jpipe.types import Batch, Leaf


class Agreement:
    """Checks that all processes agree, before the first step of each kind and shape.

    Args:
      planner: of the pipeline.
    """

    def __init__(self, planner: Planner):
        self._planner, self._known = planner, set()

    def check(self, batch: Batch, what: str, key: jax.Array | None = None) -> None:
        """Compares this process's configuration with the others'; with one process it does nothing.

        Args:
          batch: `[B, ...]`.
          what: what it is for; values of the batch don't matter for "init".
          key: the random key, if there is one that the others should have, too.

        Raises:
          ValueError: an array of the batch is on devices of this process alone, or the processes disagree.
          RuntimeError: others don't come.
        """
        mesh = self._planner.request.mesh
        if jax.process_count() == 1 or not mesh.is_multi_process:
            return
        check_placed(batch)
        step = (what, jax.tree.structure(batch), *((a.shape, a.dtype) for a in jax.tree.leaves(batch)))
        if step not in self._known:
            agreed = facts(self._planner.known_plan(), batch, values=what != "init", key=key)
            words = "configurations with the other processes"
            with task(f"comparing {words}"), followed(f"the comparison of {words}", batch):
                check_agreement({"call": what, **agreed}, processes_of(mesh))
            self._known.add(step)


def check_placed(batch: Batch) -> None:
    """Checks, where the mesh has devices of several processes, that no array of a batch is on some of one of them.

    Raises:
      ValueError: naming the first that is.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if _is_on_own_devices(leaf) and leaf.committed:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} is on devices of process {jax.process_index()} alone, but the mesh "
                "has those of several processes; give pipe.place(batch), with the rows that this process feeds "
                "(pipe.data_shard)"
            )


def processes_of(mesh: Mesh) -> tuple[int, ...]:
    """The indices of the processes whose devices the mesh has."""
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def facts(plan: Plan, batch: Batch, *, values: bool, key: jax.Array | None = None) -> dict[str, str]:
    """The configuration by name, in words.

    Args:
      plan: the pipeline's.
      batch: the batch of the step, `[B, ...]`.
      values: whether its arrays that aren't divided among processes have to be equal, too.
      key: the random key of the step, if it has one.
    """
    request = plan.request
    schedule, mesh, options, splits = request.schedule, request.mesh, request.options, request.splits
    settings = splits.shard_over, splits.gather, options.cast, options.unroll, options.ends, options.offload
    words = {
        **{name: str(size) for name, size in schedule.sizes.items()},
        "schedule": f"{schedule.name} ({_digest(f'{schedule.actions}{schedule.slots}'.encode())})",
        "remat": _name(request.remat),
        "mesh": f"{dict(mesh.shape)} of the devices {_shortened([d.id for d in mesh.devices.flat])}",
        "batch_axes": str(request.splits.batch_axes),
        "shard_over, gather, cast, unroll, ends, offload": str(settings),
        "rings, loss_over": str((options.rings, options.loss_over)),
        "merge": str(dict(sorted(request.merge.items()))),
        "layers": str(plan.traced.num_layers),
    }
    for index in range(plan.traced.num_layers):
        group = plan.traced.group_at(index)
        split = f", split by {_shortened(group.specs)}" if request.splits.axes else ""
        words[f"layer {index}"] = f"{group.layer.name} with {_shortened(describe(group.variables))}{split}"
    words |= {"cuts": _shortened(plan.partition.cuts), "costs of layers": _shortened(plan.partition.layer_costs)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        name = f"batch{jax.tree_util.keystr(path)}"
        words[name] = describe(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        if values and _is_own(leaf):
            remedy = "rows of this process alone go through pipe.place"
            words[f"the values of {name} ({remedy})"] = _digest(np.asarray(leaf).tobytes())
    if key is not None and _is_own(key):
        words["key"] = _shortened(np.asarray(jax.random.key_data(key)).tolist())
    return words | {"JAX": jax.__version__}


def _is_own(leaf: Leaf) -> bool:
    """Whether a leaf has values, which this process alone knows."""
    return isinstance(leaf, np.ndarray) or _is_on_own_devices(leaf)


def _is_on_own_devices(leaf: Leaf) -> TypeGuard[jax.Array]:
    """Whether a leaf is an array on devices of this process alone."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_fully_addressable


def _name(remat: Remat) -> str:
    names = [name for name, mode in MODES.items() if mode == remat]
    return names[0] if names else getattr(remat.policy, "__qualname__", type(remat.policy).__name__)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]


def _shortened(value: object, most: int = 200) -> str:
    """A value in words; the middle of long ones is left out, but told apart by a digest."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most // 2]}... ({_digest(text.encode())})"
