"""Checks what users pass to a pipeline's methods besides batches, and that processes agree, before it compiles.

Every error names the offender, its value, what was expected and what to do.

Two processes with other programs would wait for each other's transfers for ever. So they compare all that decides which
program a step is (`check_agree`): they exchange texts through the key-value store of `jax.distributed`, which runs
beside the devices, so that a process waits only for some time, and nothing is compiled.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeGuard

import jax
import numpy as np
from flax import serialization
from jax.core import Tracer

from jpipe.jax.in_place import is_apart
from jpipe.jax.trees import Casts, check_same_shapes, named_leaves
from jpipe.layers.base import describe
from jpipe.memory.layout import NOT_SAVED, StageTree, laid_out
from jpipe.model.loss import loss_name
from jpipe.model.remat import MODES, Remat
from jpipe.planning.plan import Plan
from jpipe.planning.step import Step
from jpipe.processes.progress import followed, task, warn_once
from jpipe.processes.runtime import shared_store, wait_for
from jpipe.training.train_state import TrainState
from jpipe.types import Batch, Leaf, PyTree


def check_variables(plan: Plan, variables: dict[str, StageTree], casts: dict[str, Casts] | None = None) -> None:
    """Checks that variables (some or all collections) are laid out by this plan; for `casts` see `check_same_shapes`.

    Raises:
      TypeError: they are no dict of `StageTree`s.
      ValueError: an unknown collection, another layout, or a leaf of another shape.
    """
    check_is_variables(variables)
    check_alive("variables", variables)
    for name, tree in variables.items():
        if name not in plan.layouts:
            raise ValueError(f"variables have the unknown collection {name!r}; expected {sorted(plan.layouts)}")
        own = plan.layouts[name]
        tree = laid_out(tree, state_on_hosts=own.state_on_hosts)
        if tree.layout != own:
            there, here = tree.layout.num_stages, own.num_stages
            differs = f"num_stages={there}, here {here}" if there != here else "layers, balance, mesh or dtypes differ"
            raise ValueError(
                f"variables[{name!r}] were laid out by another pipeline ({differs}); translate them: {translated(plan)}"
            )
        own_casts = None if casts is None else casts.setdefault(name, {})
        check_same_shapes(f"variables[{name!r}]", tree, own.shapes, own_casts)


def translated(plan: Plan) -> str:
    """The call that takes variables over from another pipeline of the same model."""
    of = "layer" if plan.request.whole is None else "model"
    return f"pipe.from_{of}_variables(other.{of}_variables(variables), batch)"


def check_is_variables(variables: object) -> None:
    """Checks that something may be variables, as far as can be told without a plan.

    Raises:
      TypeError: it is no dict by collection; the likely remedy is named.
    """
    if isinstance(variables, StageTree):
        raise TypeError('variables is a single collection; pass them by collection, such as {"params": grads}')
    kind = type(variables).__name__
    if isinstance(variables, list | tuple):
        raise TypeError(f"variables is a {kind}; lay out trees of layers by pipe.from_layer_variables(trees, batch)")
    if not isinstance(variables, dict) or not variables:
        what = "state.variables" if hasattr(variables, "variables") else "what pipe.init returned, a dict by collection"
        raise TypeError(f"variables is a {kind}; pass {what}")
    for name, tree in variables.items():
        if not isinstance(tree, StageTree):
            raise TypeError(
                f"variables[{name!r}] is a {type(tree).__name__}, not laid out by a pipeline (a batch comes after): "
                "use pipe.from_model_variables(tree, batch), of a list pipe.from_layer_variables(trees, batch)"
            )


def check_complete(plan: Plan, variables: dict[str, StageTree], casts: dict[str, Casts] | None = None) -> None:
    """Checks that variables are laid out by this plan and that no collection is missing; arguments as before.

    Raises:
      TypeError, ValueError: as `check_variables`; or naming the first collection that is.
    """
    check_variables(plan, variables, casts)
    if missing := sorted(set(plan.layouts) - set(variables)):
        raise ValueError(f"variables lack the collection {missing[0]!r}; pass what pipe.init returned")


def check_callable(**functions: object) -> None:
    """Checks that arguments are functions."""
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"{name}={function!r} is not callable; pass a function")


def check_state(state: object) -> None:
    """Checks that something is a training state that wasn't donated.

    Raises:
      TypeError: it is something else.
      ValueError: it was donated.
    """
    if not isinstance(state, TrainState):
        raise TypeError(f"state is a {type(state).__name__}; make it with pipe.create_state(key, batch, tx)")
    check_alive("state", state)


def check_offload(plan: Plan, state: TrainState) -> None:
    """Checks that an optimiser's state lies in the memory in which a step of this plan has it.

    Raises:
      ValueError: another pipeline's `offload=` put it into the other memory.
    """
    on_hosts = state.variables["params"].layout.state_on_hosts
    if on_hosts != plan.layouts["params"].state_on_hosts:
        where = "hosts" if on_hosts else "devices"
        raise ValueError(
            f"state was made with another offload=, on the {where}; move it: state = pipe.place_state(state, tx)"
        )


def check_step(step: Step, key: jax.Array | None) -> None:
    """Checks that a step has its key, and says once that nothing moves to the hosts on CPUs, if something is to.

    Raises:
      ValueError: a layer or the loss draws random numbers, and there is no key; the first that does is named.
    """
    needy = [group.in_words for group in step.model.groups if group.needs_key]
    needy += [f"loss_fn {loss_name(step.loss.function)}"] if step.loss is not None and step.loss.needs_key else []
    if key is None and needy:
        raise ValueError(f"{needy[0]} draws random numbers, but key=None; pass key=jax.random.key(...)")
    request = step.plan.request
    if (step.kept.away or request.offload.optimizer) and not is_apart(request.mesh):
        warn_once("offload= moves nothing on CPUs, which have no memory besides their host's; steps are the same")


def check_loop_state(plan: Plan, state: PyTree) -> None:
    """Checks what `place_state` is given.

    Raises:
      TypeError: a leaf is no array and no number.
      ValueError: it was donated, or laid out for other stages.
    """
    is_tree = lambda node: isinstance(node, StageTree)
    stages = plan.request.schedule.num_stages
    for node in filter(is_tree, jax.tree.leaves(state, is_leaf=is_tree)):
        if node.layout.num_stages != stages:
            raise ValueError(
                f"state was laid out for num_stages={node.layout.num_stages}, and this pipeline has {stages}; begin "
                f"with {translated(plan)}, or go from one to the other by a jpipe.Checkpointer"
            )
    for name, leaf in named_leaves("state", state):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex):
            raise TypeError(f"{name} is a {type(leaf).__name__}, which can't lie on devices; pass arrays and numbers")
    check_alive("state", state)


def check_alive(what: str, tree: PyTree) -> None:
    """Checks that arrays weren't donated to an earlier step.

    Raises:
      ValueError: they were, so that they are gone.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
            raise ValueError(
                f"{what}: these arrays were donated to an earlier train_step, and are gone; go on with the state that "
                "it returned, or keep a copy before a step: jax.tree.map(jnp.copy, state.variables)"
            )


def call_of(what: object, *arguments: PyTree) -> tuple[object, ...]:
    """The key by which a call's checks are known to have passed.

    It is what the call does, the types of its arguments, which of them the user put on this process's own devices, the
    mesh in context, and how wide numbers may be.
    """
    leaves, structure = jax.tree.flatten(arguments)
    owns = jax.process_count() > 1
    types = [(getattr(x, "shape", None), getattr(x, "dtype", None), owns and _is_put_on_own(x)) for x in leaves]
    return what, structure, *types, jax.sharding.get_abstract_mesh(), jax.dtypes.canonicalize_dtype(float)


# --- saving -----------------------------------------------------------------------------------------------------------


def _refuse(*_: object) -> NoReturn:
    raise TypeError(NOT_SAVED)


def refuse_serialization() -> None:
    """Has Flax's serialisation refuse variables and states, and say what to save instead.

    Variables are laid out over a pipeline's devices, so that their bytes mean nothing to another pipeline. `pickle` is
    told by `StageTree` itself.
    """
    for kind in (StageTree, TrainState):
        serialization.register_serialization_state(kind, _refuse, _refuse, override=True)


# --- processes that compute together ----------------------------------------------------------------------------------


def check_agree(plan: Plan, what: str, batch: Batch, key: jax.Array | None = None) -> None:
    """Compares this process's configuration with the others'; with one process it does nothing.

    Args:
      plan: the pipeline's.
      what: what it is for; values of the batch don't matter for "init".
      batch: `[B, ...]`.
      key: the random key, if there is one that the others should have, too.

    Raises:
      ValueError: an array of the batch is on devices of this process alone, or the processes disagree.
      RuntimeError: others don't come.
    """
    mesh = plan.request.mesh
    if jax.process_count() == 1 or not mesh.is_multi_process:
        return
    agreed, words = facts(plan, batch, values=what != "init", key=key), "configurations with the other processes"
    with task(f"comparing {words}"), followed(f"the comparison of {words}", ()):
        check_agreement({"call": what, **agreed}, sorted({d.process_index for d in mesh.devices.flat}))


def facts(plan: Plan, batch: Batch, *, values: bool, key: jax.Array | None = None) -> dict[str, str]:
    """The configuration by name, in words.

    Args:
      plan: the pipeline's.
      batch: the batch of the step, `[B, ...]`.
      values: whether its arrays that aren't divided among processes have to be equal, too.
      key: the random key of the step, if it has one.

    Raises:
      ValueError: naming the first array of the batch that the user put on devices of this process alone.
    """
    request = plan.request
    schedule, mesh, splits = request.schedule, request.mesh, request.splits
    lying = {name: getattr(splits, name) for name in ("batch_axes", "shard_over", "gather")}
    settings = schedule.sizes | lying | {name: getattr(request, name) for name in ("ends", "offload", "loss_over")}
    words = {
        **{name: str(value) for name, value in settings.items()},
        "schedule": f"{schedule.name} ({_digest(f'{schedule.actions}{schedule.slots}'.encode())})",
        "remat": remat_name(request.remat),
        "mesh": f"{dict(mesh.shape)} of the devices {_shortened([d.id for d in mesh.devices.flat])}",
        "merge": str(dict(sorted(request.merge.items()))),
        "layers": str(plan.model.num_layers),
    }
    for index in range(plan.model.num_layers):
        group = plan.model.group_at(index)
        split = f", split by {_shortened(group.specs)}" if splits.axes else ""
        words[f"layer {index}"] = f"{group.layer.name} with {_shortened(describe(group.variables))}{split}"
    words |= {"cuts": _shortened(plan.partition.cuts), "costs of layers": _shortened(plan.partition.layer_costs)}
    for name, leaf in named_leaves("batch", batch):
        if _is_put_on_own(leaf):
            raise ValueError(
                f"{name} is on devices of process {jax.process_index()} alone, but the mesh has those of several; give "
                "pipe.place(batch), with the rows that this process feeds (pipe.data_shard)"
            )
        words[name] = describe(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        if values and _is_own(leaf):
            words[f"the values of {name} (own rows go through pipe.place)"] = _digest(np.asarray(leaf).tobytes())
    if key is not None and _is_own(key):
        words["key"] = _shortened(np.asarray(jax.random.key_data(key)).tolist())
    return words | {"JAX": jax.__version__}


def _is_own(leaf: Leaf) -> bool:
    """Whether a leaf has values, which this process alone knows."""
    return isinstance(leaf, np.ndarray) or _is_on_own_devices(leaf)


def _is_on_own_devices(leaf: Leaf) -> TypeGuard[jax.Array]:
    """Whether a leaf is an array on devices of this process alone."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_fully_addressable


def _is_put_on_own(leaf: Leaf) -> bool:
    """Whether the user put a leaf on devices of this process alone."""
    return _is_on_own_devices(leaf) and leaf.committed


def remat_name(remat: Remat) -> str:
    """The name of a mode of rematerialisation, or of the user's policy."""
    names = [name for name, mode in MODES.items() if mode == remat]
    return names[0] if names else getattr(remat.policy, "__qualname__", type(remat.policy).__name__)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]


def _shortened(value: object) -> str:
    """A value in words; the middle of long ones is left out, but told apart by a digest."""
    text = str(value)
    return text if len(text) <= 200 else f"{text[:100]}... ({_digest(text.encode())})"


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
    first, *others = sorted(processes)
    if store is None or not others:  # without a service there is nobody to ask
        return
    turn = next(_turns.setdefault(tuple(processes), itertools.count()))
    folder = f"jpipe/agreement/{','.join(map(str, processes))}/{turn}"
    if process == first:
        deadline = time.monotonic() + SECONDS
        texts = {p: wait_for(store, f"{folder}/{p}", deadline - time.monotonic()) for p in others}
        came = {p: text for p, text in texts.items() if text is not None}
        for p in came:
            store.key_value_delete(f"{folder}/{p}")
        late = _late([p for p in others if p not in came])
        verdict = late, late or differences({first: facts} | {p: json.loads(text) for p, text in came.items()})
        store.key_value_set(f"{folder}/verdict", json.dumps(verdict))
    else:
        store.key_value_set(f"{folder}/{process}", json.dumps(dict(facts)))
        # The others wait a little longer, so that the first process says who is missing.
        answer = wait_for(store, f"{folder}/verdict", SECONDS + 5)
        verdict = [_late([first])] * 2 if answer is None else json.loads(answer)
    late, fault = verdict
    if fault:
        raise (RuntimeError if late else ValueError)(fault)


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
    """The message that names the processes that didn't come; empty if all did."""
    who = f"process {', '.join(map(str, missing))} did not come to the same step within {SECONDS:g} s"
    return f"{who}; all processes have to take the same steps of the same pipelines" if missing else ""
