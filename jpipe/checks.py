"""Checks what users pass to a pipeline's methods besides batches, before anything is compiled.

Every error names the offender, its value, what was expected and what to do.
"""

from __future__ import annotations

from typing import NoReturn

import jax
import numpy as np
from flax import serialization
from jax.core import Tracer

from jpipe.jax.in_place import is_apart
from jpipe.jax.trees import check_same_shapes, check_same_structure
from jpipe.memory.layout import NOT_SAVED, StageTree, laid_out
from jpipe.model.groups import Model
from jpipe.model.loss import TracedLoss, loss_name
from jpipe.planning.plan import Plan
from jpipe.planning.step import Step
from jpipe.processes.progress import warn_once
from jpipe.schedules.schedule import Schedule
from jpipe.training.train_state import TrainState
from jpipe.types import PyTree
from jpipe.users_numbers import integer_or_none


def check_variables(plan: Plan, variables: dict[str, StageTree]) -> None:
    """Checks that variables (some or all collections) are laid out by this plan.

    Raises:
      TypeError: they are no dict of `StageTree`s.
      ValueError: an unknown collection, another layout, or a leaf of another shape.
    """
    check_is_variables(variables)
    check_alive("variables", variables)
    for name, tree in variables.items():
        if name not in plan.layouts:
            raise ValueError(f"variables have the unknown collection {name!r}; expected {sorted(plan.layouts)}")
        tree = laid_out(tree, state_on_hosts=plan.layouts[name].state_on_hosts)
        if tree.layout != plan.layouts[name]:
            stages, here = tree.layout.num_stages, plan.layouts[name].num_stages
            differs = f"num_stages={stages}, here {here}; layers, balance or mesh may differ too"
            raise ValueError(
                f"variables[{name!r}] were laid out by another pipeline "
                f"({differs if stages != here else 'its layers, balance or mesh differ'}); translate them: "
                f"{translated(plan)}"
            )
        check_same_structure(f"variables[{name!r}]", tree, plan.layouts[name].shapes)
        check_same_shapes(f"variables[{name!r}]", tree, plan.layouts[name].shapes)


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
    if isinstance(variables, list | tuple):
        raise TypeError(
            f"variables is a {type(variables).__name__}; lay out trees of layers by "
            "pipe.from_layer_variables(trees, batch), a model's own by pipe.from_model_variables(tree, batch)"
        )
    if not isinstance(variables, dict) or not variables:
        what = "state.variables" if hasattr(variables, "variables") else "what pipe.init returned, a dict by collection"
        raise TypeError(f"variables is a {type(variables).__name__}; pass {what}")
    for name, tree in variables.items():
        if not isinstance(tree, StageTree):
            raise TypeError(
                f"variables[{name!r}] is a {type(tree).__name__}, not laid out by a pipeline; "
                "use pipe.from_model_variables(tree, batch), of a list pipe.from_layer_variables(trees, batch) (a "
                "batch comes after the variables)"
            )


def check_complete(plan: Plan, variables: dict[str, StageTree]) -> None:
    """Checks that variables are laid out by this plan and that no collection is missing.

    Raises:
      TypeError, ValueError: as `check_variables`; or naming the first collection that is.
    """
    check_variables(plan, variables)
    missing = sorted(set(plan.layouts) - set(variables))
    if missing:
        raise ValueError(f"variables lack the collection {missing[0]!r}; pass what pipe.init returned")


def check_key(model: Model, loss: TracedLoss | None, key: jax.Array | None) -> None:
    """Checks that there is a key if a layer or the loss draws random numbers.

    Raises:
      ValueError: naming the first that does.
    """
    needy = [f"layer {group.indices[0]} ({group.layer.name})" for group in model.groups if group.needs_key]
    needy += [f"loss_fn {loss_name(loss.function)}"] if loss is not None and loss.needs_key else []
    if key is None and needy:
        raise ValueError(f"{needy[0]} draws random numbers, but key=None; pass key=jax.random.key(...)")


def check_callable(**functions: object) -> None:
    """Checks that arguments are functions."""
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"{name}={function!r} is not callable; pass a function")


def check_trains(schedule: Schedule) -> None:
    """Checks that a schedule has backward actions."""
    if not schedule.trains:
        raise ValueError(f"schedule {schedule.name!r} has no backward actions, so it can't train; use '1f1b'")


def check_enough_layers(num_layers: int, num_stages: int, num_chunks: int) -> None:
    """Checks that every virtual stage gets a layer.

    Raises:
      ValueError: there are too few.
    """
    stages, chunks = integer_or_none(num_stages) or 0, integer_or_none(num_chunks) or 0
    if min(stages, chunks) > 0 and stages * chunks > num_layers:
        raise ValueError(
            f"num_stages={num_stages} times num_chunks={num_chunks} is more than the {num_layers} layers; "
            f"every stage and chunk needs at least one layer: use num_stages * num_chunks <= {num_layers}, or cut the "
            "model into more layers"
        )


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
    here, there = plan.layouts["params"].state_on_hosts, state.variables["params"].layout.state_on_hosts
    if here != there:
        memories = {True: "the memory of the hosts", False: "that of the devices"}
        raise ValueError(
            f"state was made with another offload=: the optimiser's state lies in {memories[there]}, and a step here "
            f"has it in {memories[here]}; move it: state = pipe.place_state(state, tx)"
        )


def check_step(step: Step, key: jax.Array | None) -> None:
    """Checks that a step has its key, and says once that nothing moves to the hosts on CPUs, if something is to.

    Raises:
      ValueError: as `check_key`.
    """
    check_key(step.model, step.loss, key)
    request = step.plan.request
    if (step.kept.away or request.options.offload.optimizer) and not is_apart(request.mesh):
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
                f"state holds arrays that were laid out for num_stages={node.layout.num_stages}, and this pipeline has "
                f"{stages}; begin with {translated(plan)} and "
                "tx.init of its parameters, or go from one to the other by a jpipe.Checkpointer"
            )
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex):
            raise TypeError(
                f"state{jax.tree_util.keystr(path)} is a {type(leaf).__name__}, which can't lie on devices; pass a "
                "pytree of arrays, random keys and numbers"
            )
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
