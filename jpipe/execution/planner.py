"""The planner: from a batch's shapes to the plan, once, and to a step for every shape.

    batch ─► MicroBatch ─► Model ─► Plan, of the first batch
                             │        │
                             └────────┴─► Step

Each is a value made from those before it. Only two things on the way use a device or a compiler: timing layers
(`balance="time"`), and compiling a layer for the order of its residuals in a TPU's memory.
"""

from __future__ import annotations

from functools import cache

import jax

from jpipe.execution.batches import MicroBatch, cut_for_evaluation, cut_for_training
from jpipe.execution.step import Step, StepSpec, build_step, layer_functions
from jpipe.jax_tools.random_keys import key_shape
from jpipe.mesh.axes import num_shards
from jpipe.mesh.on_stages import shapes_only
from jpipe.mesh.users_mesh import check_context
from jpipe.model.groups import Model
from jpipe.model.loss import TracedLoss, trace_loss
from jpipe.model.trace import trace_model
from jpipe.model.traced_layer import trace_layer
from jpipe.planning.costs import TracedGroup
from jpipe.planning.partition import Partition
from jpipe.planning.plan import Plan, early_partition, make_plan
from jpipe.planning.request import Request
from jpipe.schedules.orders import make_schedule
from jpipe.terminal.progress import task
from jpipe.types import Batch, PyTree


class Planner:
    """What follows from the batches that a pipeline has seen; what is asked for again is made once.

    Args:
      request: what the user asked for.

    Attributes:
      plan: None until a batch was seen.
      model: micro-batch -> the layers traced at its shapes, checked against the plan if there is one.
      loss: micro-batch -> the loss that follows them, checked.
      groups: micro-batch, type of random keys -> the layers of each group in training.
    """

    def __init__(self, request: Request):
        self.request = request
        self.plan: Plan | None = None
        self.model, self.loss, self.groups = cache(self._model), cache(self._loss), cache(self._groups)
        self._steps: dict[tuple[MicroBatch, jax.ShapeDtypeStruct], Step] = {}

    def clear_cache(self) -> None:
        """Forgets what was traced and laid out, but for the plan."""
        for kept in (self.model, self.loss, self.groups):
            kept.cache_clear()
        self._steps.clear()

    # --- batch -> micro-batch ---

    def for_training(self, batch: Batch) -> MicroBatch:
        """The micro-batches of a training batch `[B, ...]`, as shapes; the errors are those of `cut_for_training`."""
        return cut_for_training(batch, self.request.schedule.num_microbatches, num_shards(self.request.mesh))

    def for_evaluation(self, batch: Batch, *, bare: bool = False) -> MicroBatch:
        """The micro-batches of an evaluation batch of any size, or of its bare inputs."""
        num_microbatches, shards = self.request.schedule.num_microbatches, num_shards(self.request.mesh)
        return cut_for_evaluation(batch, num_microbatches, shards, bare=bare)

    # --- micro-batch -> model ---

    def _model(self, micro: MicroBatch) -> Model:
        given = self.request
        read = _itself if micro.bare else given.read_inputs
        with shapes_only(given.mesh), task(f"tracing {len(given.layers)} layers"):
            model = trace_model(given.layers, read, micro.shapes, given.splits)
        if self.plan is not None:
            self.plan.check_model(model)
        return model

    def _loss(self, micro: MicroBatch) -> TracedLoss:
        outputs = self.model(micro).outputs
        with shapes_only(self.request.mesh):
            return trace_loss(self.request.loss_fn, outputs, micro.shapes)

    def _groups(self, micro: MicroBatch, key: jax.ShapeDtypeStruct) -> list[TracedGroup]:
        functions, found = layer_functions(self.model(micro), self._training_spec(micro, key)), []
        with (
            shapes_only(self.request.mesh),
            task("tracing forward and backward", total=len(functions), unit="groups of layers") as advance,
        ):
            for function in functions:
                arguments = function.shapes(micro.shapes)
                found.append(TracedGroup(function, arguments, trace_layer(function, arguments)))
                advance()
        return found

    # --- model -> plan ---

    @property
    def partition(self) -> Partition:
        """The cuts, as far as they are known.

        Raises:
          ValueError: the costs follow from shapes, and no batch was seen yet.
        """
        found = early_partition(self.request) if self.plan is None else self.plan.partition
        if found is None:
            raise ValueError(
                f"the partition under balance={self.request.balance!r} follows from the batch's shapes; call "
                "pipe.init(key, batch) first (or jax.eval_shape(pipe.init, key, batch), which computes nothing)"
            )
        return found

    def known_plan(self) -> Plan:
        """The plan, which a batch has to have decided already."""
        if self.plan is None:
            raise ValueError(
                "this pipeline has seen no batch yet, so it has no layout; call pipe.init(key, batch) first, or pass a "
                "batch to from_layer_variables(trees, batch)"
            )
        return self.plan

    def plan_for(self, batch: Batch) -> Plan:
        """The plan; made from this batch's shapes if it is the first one."""
        check_context(self.request.mesh)
        if self.plan is None:
            micro = self.for_training(batch)
            with task(f"planning {len(self.request.layers)} layers"):
                model, loss = self.model(micro), self.loss(micro)
                # With keys of the default implementation, so that equal pipelines are cut alike whatever keys come.
                self.plan = make_plan(self.request, model, loss, lambda: self.groups(micro, key_shape()))
        return self.plan

    # --- plan -> step ---

    def training_step(self, batch: Batch, key: jax.Array | None = None) -> Step:
        """The step of training for a batch's shapes and a type of random keys.

        It is kept: the order of its residuals in memory may have taken a compilation.
        """
        micro, kind = self.for_training(batch), key_shape(key)
        groups = self.groups(micro, kind)
        if (micro, kind) not in self._steps:
            with shapes_only(self.request.mesh):
                spec = self._training_spec(micro, kind)
                self._steps[micro, kind] = build_step(self.known_plan(), self.model(micro), spec, groups)
        return self._steps[micro, kind]

    def _training_spec(self, micro: MicroBatch, key: jax.ShapeDtypeStruct) -> StepSpec:
        given = self.request
        return StepSpec(key, given.loss_fn, given.remat, given.schedule, given.merge, self.loss(micro).metrics)

    def evaluation_step(self, batch: Batch, *, with_loss: bool, bare: bool = False) -> Step:
        """The step forward only, for the shapes of a batch or of its bare inputs."""
        micro, given = self.for_evaluation(batch, bare=bare), self.request
        sizes = {"num_stages": given.schedule.num_stages, "num_chunks": given.schedule.num_chunks}
        schedule = make_schedule("forward", **sizes, num_microbatches=micro.count)
        spec = StepSpec(None, given.loss_fn if with_loss else None, given.remat, schedule, given.merge)
        with shapes_only(given.mesh):
            return build_step(self.known_plan(), self.model(micro), spec)


def _itself(batch: Batch) -> PyTree:
    return batch
