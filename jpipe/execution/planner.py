"""The planner: from a batch's shapes to the plan, once, and to a step for every shape.

It traces the layers at the shapes of a micro-batch and keeps what it found. Only two things here use a device or a
compiler: timing layers (`balance="time"`), and compiling a layer for the order of its residuals in a TPU's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh

from jpipe.execution.batches import batch_size, check_divides, evaluation_microbatches, microbatch_shapes
from jpipe.execution.step import Step, StepSpec, build_step, layer_functions
from jpipe.jax_tools.dtypes import accumulator_dtype
from jpipe.jax_tools.memory_order import Order, result_orders
from jpipe.jax_tools.random_keys import key_shape
from jpipe.jax_tools.tracing import trace
from jpipe.layers.base import AnyLayer, describe
from jpipe.mesh.axes import num_shards
from jpipe.mesh.programs import shapes_only
from jpipe.mesh.splits import Splits
from jpipe.mesh.users_mesh import check_context
from jpipe.model.groups import Model
from jpipe.model.layer_function import LayerFunction
from jpipe.model.loss import check_loss, loss_sums, warn_of_moving_weight
from jpipe.model.merging import check_collections
from jpipe.model.remat import Remat
from jpipe.model.trace import trace_model
from jpipe.model.traced_layer import DeviceForward, TracedLayer, trace_layer
from jpipe.planning.costs import Layer
from jpipe.planning.options import Options
from jpipe.planning.partition import Partition
from jpipe.planning.plan import Balance, Plan, early_partition, make_plan
from jpipe.schedules.orders import make_schedule
from jpipe.schedules.schedule import Schedule
from jpipe.terminal.first_calls import compiles
from jpipe.terminal.progress import task


@dataclass(eq=False, kw_only=True)
class Planner:
    """What a pipeline was asked for, checked, and what follows from the batches that it has seen."""

    layers: tuple[AnyLayer, ...]
    loss_fn: Callable[[Any, Any], Any]
    read_inputs: Callable[[Any], Any]
    remat: Remat
    merge: Mapping[str, str]
    balance: Balance
    schedule: Schedule
    mesh: Mesh
    splits: Splits
    options: Options
    _plan: Plan | None = None
    _models: dict[Any, Model] = field(default_factory=dict)
    _layers: dict[Any, TracedLayer] = field(default_factory=dict)
    _checked: set[Any] = field(default_factory=set)
    _orders: dict[Any, list[Order | None]] = field(default_factory=dict)

    @property
    def partition(self) -> Partition:
        """The cuts, as far as they are known.

        Raises:
          ValueError: the costs follow from shapes, and no batch was seen yet.
        """
        if self._plan is not None:
            return self._plan.partition
        early = early_partition(self.balance, len(self.layers), self.schedule.num_stages, self.schedule.num_chunks)
        if early is None:
            raise ValueError(
                f"the partition under balance={self.balance!r} follows from the batch's shapes; call "
                "pipe.init(key, batch) first (or jax.eval_shape(pipe.init, key, batch), which computes nothing)"
            )
        return early

    def shapes(self, batch: Any) -> Any:
        """The shapes of one micro-batch of a training batch `[B, ...]`, checked."""
        size = batch_size(batch)
        check_divides(size, self.schedule.num_microbatches, num_shards(self.mesh))
        return microbatch_shapes(batch, self.schedule.num_microbatches)

    def evaluation_schedule(self, batch: Any) -> Schedule:
        """Forward only, for a batch of any size."""
        given = self.schedule
        count = evaluation_microbatches(batch_size(batch), given.num_microbatches, num_shards(self.mesh))
        sizes = {"num_stages": given.num_stages, "num_chunks": given.num_chunks}
        return make_schedule("forward", **sizes, num_microbatches=count)

    def evaluation_shapes(self, batch: Any) -> Any:
        """The shapes of one micro-batch of an evaluation batch."""
        return microbatch_shapes(batch, self.evaluation_schedule(batch).num_microbatches)

    @property
    def has_plan(self) -> bool:
        """Whether a batch was seen."""
        return self._plan is not None

    def known_plan(self) -> Plan:
        """The plan, which a batch has to have decided already."""
        if self._plan is None:
            raise ValueError(
                "this pipeline has seen no batch yet, so it has no layout; call pipe.init(key, batch) first, or pass a "
                "batch to from_layer_variables(trees, batch)"
            )
        return self._plan

    def plan_for(self, batch: Any) -> Plan:
        """The plan; made from this batch's shapes if it is the first one."""
        check_context(self.mesh)
        if self._plan is None:
            shapes = self.shapes(batch)
            with task(f"planning {len(self.layers)} layers"):
                self._plan = self._planned(shapes)
        return self._plan

    def _planned(self, shapes: Any) -> Plan:
        """The plan for the shapes of a micro-batch."""
        model = self.model_with_loss(shapes)
        check_collections(self.merge, model.groups)
        with shapes_only(self.mesh):
            warn_of_moving_weight(model, self.loss_fn, shapes)
            return make_plan(
                model,
                lambda: self.layers_of(model, shapes),
                shapes,
                balance=self.balance,
                placement=self.schedule.placement,
                mesh=self.mesh,
                splits=self.splits,
                options=self.options,
            )

    def model(self, shapes: Any, bare: bool = False) -> Model:
        """The layers traced at the shapes of a micro-batch, or of its bare inputs; checked against the plan."""
        cache = (bare, *_as_key(shapes))
        if cache not in self._models:
            with shapes_only(self.mesh), task(f"tracing {len(self.layers)} layers"):
                read = _itself if bare else self.read_inputs
                model = trace_model(self.layers, read, self._inputs(read, shapes), shapes, self.splits)
            if self._plan is not None:
                self._plan.check_model(model)
            self._models[cache] = model
        return self._models[cache]

    def model_with_loss(self, shapes: Any) -> Model:
        """The layers traced at the shapes of a micro-batch, for which the loss is checked too."""
        model = self.model(shapes)
        if _as_key(shapes) not in self._checked:
            with shapes_only(self.mesh):
                check_loss(model, self.loss_fn, shapes)
            self._checked.add(_as_key(shapes))
        return model

    def loss_shape(self) -> jax.ShapeDtypeStruct:
        """The type of the loss of a whole batch."""
        plan = self.known_plan()
        with shapes_only(self.mesh):
            loss, *_ = trace(lambda y, batch: loss_sums(self.loss_fn(y, batch)), plan.model.outputs, plan.batch)[1]
        return jax.ShapeDtypeStruct((), accumulator_dtype(loss.dtype))

    def _inputs(self, read_inputs: Callable[[Any], Any], shapes: Any) -> Any:
        """The shapes of what the first layer takes."""
        try:
            inputs = trace(read_inputs, shapes)[1]
        except (LookupError, AttributeError) as error:
            raise ValueError(
                f"inputs raised {type(error).__name__}: {error} for the batch {describe(shapes)}; it has to return "
                "what the first layer takes"
            ) from error
        if not jax.tree.leaves(inputs):
            raise ValueError(f"inputs returned {inputs!r} for the batch {describe(shapes)}, which holds no arrays")
        return inputs

    def _spec(self, key: jax.ShapeDtypeStruct | None, schedule: Schedule, *, with_loss: bool) -> StepSpec:
        return StepSpec(key, self.loss_fn if with_loss else None, self.remat, schedule, self.merge)

    def step(self, batch: Any, *, train: bool, with_loss: bool, key: Any = None, bare: bool = False) -> Step:
        """The step for a batch's shapes and a type of key, for training or forward only."""
        plan = self.known_plan()
        schedule = self.schedule if train else self.evaluation_schedule(batch)
        shapes = self.shapes(batch) if train else self.evaluation_shapes(batch)
        spec = self._spec(key_shape(key) if train else None, schedule, with_loss=with_loss)

        def orders(function: LayerFunction, forward: DeviceForward) -> list[Order | None]:
            """Found once for each group at these shapes: that may take a compilation."""
            known = (function.group.indices[0], function.key, *_as_key(shapes))
            if known not in self._orders:
                self._orders[known] = result_orders(forward.jaxpr, forward.residuals_at, self.mesh)
            return self._orders[known]

        with shapes_only(self.mesh):
            model = plan.arranged(self.model(shapes, bare))
            compiles(f"{model.described()}, {_described(schedule)}")
            functions, traced = layer_functions(model, spec) if train else [], []
            with task("tracing forward and backward", total=len(functions), unit="groups of layers") as advance:
                for function in functions:
                    traced.append(self._traced(function, shapes))
                    advance()
            return build_step(plan, model, spec, shapes, traced=traced, orders=orders)

    def layers_of(self, model: Model, shapes: Any) -> list[Layer]:
        """What the layers of each group compute in training, traced."""
        # With keys of the default implementation, so that equal pipelines are cut alike whatever keys they meet.
        functions = layer_functions(model, self._spec(key_shape(), self.schedule, with_loss=True))
        found = []
        with task("tracing forward and backward", total=len(functions), unit="groups of layers") as advance:
            for function in functions:
                found.append(Layer(function, function.shapes(shapes), self._traced(function, shapes)))
                advance()
        return found

    def _traced(self, function: LayerFunction, shapes: Any) -> TracedLayer:
        """A group's forward and backward in training, traced once for these shapes of a micro-batch and its key."""
        known = (function.group.indices[0], function.key, *_as_key(shapes))
        if known not in self._layers:
            self._layers[known] = trace_layer(function, function.shapes(shapes))
        return self._layers[known]


def _as_key(shapes: Any) -> tuple:
    """What tells shapes apart, hashable."""
    return jax.tree.structure(shapes), tuple((a.shape, a.dtype) for a in jax.tree.leaves(shapes))


def _described(schedule: Schedule) -> str:
    chunks = f"V={schedule.num_chunks}, " * (schedule.num_chunks > 1)
    return f"{schedule.name}, K={schedule.num_stages}, {chunks}M={schedule.num_microbatches}"


def _itself(batch: Any) -> Any:
    return batch
