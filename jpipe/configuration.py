"""Lists all that decides which program a step is, and has processes compare it (`Agreement`) before they compute.

Two processes with other programs would wait for each other's transfers for ever. They exchange texts through the
key-value store of `jax.distributed`, which runs beside the devices, so that a process waits only for some time, and
nothing is compiled.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import TypeGuard

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from jpipe.layers.base import describe
from jpipe.model.remat import MODES, Remat
from jpipe.planning.plan import Plan
from jpipe.planning.planner import Planner
from jpipe.processes.progress import followed, task
from jpipe.processes.runtime import shared_store, wait_for
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


# --- comparing facts --------------------------------------------------------------------------------------------------


SECONDS = 300.0
"""How long a process waits for the others at its first step."""
_SHOWN = 3
_turns: dict[tuple[int, ...], itertools.count] = {}


def check_agreement(facts: Mapping[str, str], processes: Sequence[int]) -> None:
    """Checks that all processes hold the same facts; they all have to call it, in the same order.

    Args:
      facts: the settings that a step depends on, by name.
      processes: the indices of the processes that compute together, this one among them.

    Raises:
      ValueError: in all processes, naming the settings that differ and their values.
      RuntimeError: a process didn't come within `SECONDS`.
    """
    store, process = shared_store(), jax.process_index()
    if store is None or len(processes) < 2:  # without a service there is nobody to ask
        return
    turn = next(_turns.setdefault(tuple(processes), itertools.count()))
    folder, first = f"jpipe/agreement/{','.join(map(str, processes))}/{turn}", min(processes)
    if process == first:
        verdict = _verdict(store, folder, processes, dict(facts))
        store.key_value_set(f"{folder}/verdict", json.dumps(verdict))
    else:
        store.key_value_set(f"{folder}/{process}", json.dumps(dict(facts)))
        # The others wait a little longer, so that the first process says who is missing.
        answer = wait_for(store, f"{folder}/verdict", SECONDS + 5)
        verdict = ["late", _late([first])] if answer is None else json.loads(answer)
    kind, message = verdict
    if message:
        raise (RuntimeError if kind == "late" else ValueError)(message)


def _verdict(store, folder: str, processes: Sequence[int], facts: dict[str, str]) -> list[str]:
    """The first process' verdict, from its facts and those of the others, which it waits for.

    Returns:
      `[kind, message]`: "differ" or "late", and a message, which is empty if all agree.
    """
    first, *others = sorted(processes)
    deadline = time.monotonic() + SECONDS
    answers = {p: wait_for(store, f"{folder}/{p}", deadline - time.monotonic()) for p in others}
    if missing := [p for p, answer in answers.items() if answer is None]:
        return ["late", _late(missing)]
    for p in others:
        store.key_value_delete(f"{folder}/{p}")
    return ["differ", differences({first: facts} | {p: json.loads(answer or "{}") for p, answer in answers.items()})]


def differences(facts_of: Mapping[int, Mapping[str, str]]) -> str:
    """The differences between the facts of some processes, as a message; empty if there are none.

    >>> print(differences({0: {"num_stages": "2", "remat": "layer"}, 1: {"num_stages": "4", "remat": "layer"}}))
    the processes disagree on num_stages: 2 in process 0, 4 in process 1; give all processes the same arguments
    """
    lines = []
    for name in dict.fromkeys(name for facts in facts_of.values() for name in facts):
        values: dict[str, list[int]] = {}
        for process, facts in facts_of.items():
            values.setdefault(facts.get(name, "nothing"), []).append(process)
        if len(values) > 1:
            whose = (f"{value} in process {', '.join(map(str, ps))}" for value, ps in values.items())
            lines.append(f"{name}: {', '.join(whose)}")
    more = f" (and {len(lines) - _SHOWN} more)" if len(lines) > _SHOWN else ""
    message = f"the processes disagree on {'; '.join(lines[:_SHOWN])}{more}; give all processes the same arguments"
    return message if lines else ""


def _late(missing: Sequence[int]) -> str:
    """The message that names the processes that didn't come."""
    return (
        f"process {', '.join(map(str, missing))} did not come to the same step within {SECONDS:g} s; all processes "
        "have to make the same pipelines and take the same steps, in the same order"
    )
