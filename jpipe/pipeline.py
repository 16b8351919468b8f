"""`Pipeline`: the class that users meet. It validates and delegates."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe import batches
from jpipe.executor import run_forward, run_training
from jpipe.kinds import Sequential, describe, trace_kinds
from jpipe.layers import as_layers, positional
from jpipe.layout import StageTree, constrain_buffers, device_index, local, stacked, take_apart
from jpipe.meshes import as_mesh, batch_axes, constrain, num_shards, on_stages, pin_batch, shapes_only, without_mesh
from jpipe.optimizer import TrainState, global_norm, state_shardings
from jpipe.partition import Partition
from jpipe.plan import Plan, as_balance, early_partition, make_plan
from jpipe.program import Program, Purpose, build_program
from jpipe.remat import as_remat
from jpipe.schedule import Schedule, make_schedule
from jpipe.stages import Stage
from jpipe.steps import LayerStep

Variables = dict[str, StageTree]


class Pipeline:
    """A sequence of layers in K stages, trained with M micro-batches a step (GPipe, arXiv 1811.06965).

    The step equals the sequential model's: same loss, same gradients, same random numbers, whatever the number of
    stages, chunks, the schedule, remat and mesh.

    Args:
      layers: a sequence of layers: `flax.linen` modules, `nnx` modules or factories `lambda rngs: Block(rngs=rngs)`,
        `jpipe.Layer(init, apply)`, functions of the activations; or a `flax.linen.Sequential` or `nnx.Sequential`. A layer
        maps one pytree of arrays to one; a tuple is passed as positional arguments.
      loss_fn: `loss_fn(outputs, batch)` of a micro-batch: its mean loss, or `(loss_sum, weight_sum)`, which are summed over
        micro-batches and divided once (weights are taken as constants).
      num_stages: K, the devices along the mesh axis `stage`.
      num_microbatches: M, a divisor of the batch size.
      num_chunks: V, virtual stages a device, for interleaved schedules.
      schedule: "naive", "gpipe", "1f1b", "interleaved", or a `jpipe.Schedule`.
      remat: "none", "layer", "stage", "full", or a `jax.checkpoint` policy for each layer; see `jpipe.remat`.
      balance: how layers are shared among stages: equal "flops", "time", "size" or "even" counts; K*V layer counts as
        integers; or one cost a layer as floats.
      mesh: a mesh with an axis `stage` of K devices; others are left to the compiler, and batches are split over those
        called "replica", "data" and "fsdp". Default: the first K devices.
      inputs: `batch -> what the first layer takes`. Default: `batch["inputs"]`, the first item of a tuple, or a bare array.

    Raises:
      ValueError, TypeError: for wrong arguments, before anything is compiled.
    """

    def __init__(
        self,
        layers: Any,
        loss_fn: Callable[[Any, Any], Any],
        *,
        num_stages: int,
        num_microbatches: int,
        num_chunks: int = 1,
        schedule: str | Schedule = "1f1b",
        remat: str | Callable[..., Any] = "layer",
        balance: Any = "flops",
        mesh: Mesh | None = None,
        inputs: Callable[[Any], Any] | None = None,
    ):
        self._layers = as_layers(layers)
        for name, function in (("loss_fn", loss_fn), ("inputs", inputs or batches.default_inputs)):
            if not callable(function):
                raise TypeError(f"{name}={function!r} is not callable; pass a function")
        sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
        self.schedule: Schedule = make_schedule(schedule, **sizes)
        if not any("B" in kinds for kinds in self.schedule.slots):
            raise ValueError(f"schedule {self.schedule.name!r} has no backward actions, so it can't train; use '1f1b'")
        self._num_parts = num_stages * num_chunks
        if self._num_parts > len(self._layers):
            raise ValueError(
                f"num_stages={num_stages} times num_chunks={num_chunks} is more than the {len(self._layers)} layers; "
                "every stage and chunk needs at least one layer"
            )
        self._loss_fn, self._inputs, self._read_inputs = loss_fn, inputs, inputs or batches.default_inputs
        self._remat = as_remat(remat)
        self._balance = as_balance(balance, len(self._layers), self._num_parts)
        self.mesh = as_mesh(mesh, num_stages)
        self._plan: Plan | None = None
        self._models: dict[Any, Sequential] = {}
        self._jit_train_steps: dict[Any, Any] = {}
        self._jit_value_and_grad = jax.jit(self._trace_value_and_grad)
        self._jit_forward = jax.jit(self._trace_forward, static_argnames=("with_loss", "bare"))
        self._jit_take_apart = jax.jit(take_apart)

    @property
    def partition(self) -> Partition:
        """Which layers each virtual stage has, and what they cost. Virtual stage s is chunk s // K of stage s % K.

        Raises:
          ValueError: the costs follow from shapes, and no batch was seen yet.
        """
        if self._plan is not None:
            return self._plan.partition
        early = early_partition(self._balance, len(self._layers), self._num_parts)
        if early is None:
            raise ValueError(
                f"the partition under balance={self._balance!r} follows from the batch's shapes; call "
                "pipe.init(key, batch) first (or jax.eval_shape(pipe.init, key, batch), which computes nothing)"
            )
        return early

    # --- variables ---

    def init(self, key: jax.Array, batch: Any) -> Variables:
        """New variables, each stage's made on its own devices.

        Args:
          key: a random key.
          batch: a batch `[B, ...]` (values don't matter), as for training.

        Returns:
          The variables by collection, `{"params": ..., "batch_stats": ...}`.
        """
        plan = self._plan_for(batch)
        key = batches.as_key(key)
        if not isinstance(key, jax.core.Tracer):
            key = jax.device_put(key, NamedSharding(self.mesh, PartitionSpec()))
        return self._jit_init(key, self._ready_values(plan))

    def layer_variables(self, variables: dict[str, Any]) -> list[Any]:
        """Each layer's own variables, in layer order.

        Args:
          variables: anything laid out like this pipeline's variables, gradients too: `{"params": grads}`.

        Returns:
          For a linen layer what `module.init` would have returned, for an nnx layer a pure dict by collection, for a
          `jpipe.Layer` what its `init` returned. Collections that `variables` lacks are missing.
        """
        model = self._known_plan().model
        self._check_variables(variables)
        items = self._jit_take_apart(variables)[model.first :][: model.num_layers]
        result = []
        for index, item in enumerate(items):
            kind = model.kinds[model.kind_of[index + model.first]]
            own = {name: tree for name, tree in item.items() if name in kind.variables}
            result.append(kind.layer.to_item(own))
        return result

    def from_layer_variables(self, trees: list[Any], batch: Any = None) -> Variables:
        """The inverse of `layer_variables`, under this pipeline's layout.

        Args:
          trees: one item a layer, as `layer_variables` returns them (of any pipeline of the same layers). Concrete arrays.
          batch: needed if this pipeline has seen none yet: shapes decide the partition.
        """
        plan = self._known_plan() if batch is None else self._plan_for(batch)
        if len(trees) != len(self._layers):
            raise ValueError(f"there are {len(trees)} trees but {len(self._layers)} layers; give one a layer")
        found: dict[str, dict[int, list[Any]]] = {name: {} for name in plan.layouts}
        for index, tree in enumerate(trees):
            kind = plan.model.kinds[plan.model.kind_of[index + plan.model.first]]
            own = kind.layer.from_item(tree)
            _check_item(f"trees[{index}] ({kind.layer.name})", own, kind.variables)
            for name in kind.variables:
                found[name][index + plan.model.first] = jax.tree.leaves(own[name])
        return {name: layout.place(found[name]) for name, layout in plan.layouts.items()}

    def modules(self, variables: dict[str, Any]) -> list[Any]:
        """Each layer as a callable with its variables: an nnx module, a bound linen module, or a function."""
        return [layer.bind(item) for layer, item in zip(self._layers, self.layer_variables(variables), strict=True)]

    # --- computing ---

    def value_and_grad(self, variables: Variables, batch: Any, key: Any = None) -> tuple[tuple[jax.Array, Any], Any]:
        """Loss and gradients of the whole batch, as `jax.value_and_grad(..., has_aux=True)`.

        Args:
          variables: the variables by collection.
          batch: pytree of arrays `[B, ...]`.
          key: a random key, if a layer draws random numbers (dropout).

        Returns:
          `((loss, updates), grads)`: a scalar, the new collections other than "params", and gradients laid out and typed
          like `variables["params"]`.
        """
        self._check_training(variables, batch, key)
        return self._jit_value_and_grad(variables, batch, None if key is None else batches.as_key(key))

    def apply(self, variables: Variables, batch: Any) -> Any:
        """The model's outputs `[B, ...]` in evaluation mode, pipelined, forward only.

        Args:
          variables: the variables by collection.
          batch: a batch as for training, or the bare inputs.
        """
        bare = batches.is_bare(batch, self._inputs)
        self._check_evaluation(variables, batch, bare)
        return self._jit_forward(variables, batch, with_loss=False, bare=bare)

    def evaluate(self, variables: Variables, batch: Any) -> jax.Array:
        """The loss of the whole batch in evaluation mode, forward only."""
        self._check_evaluation(variables, batch, bare=False)
        return self._jit_forward(variables, batch, with_loss=True, bare=False)

    # --- training ---

    def create_state(self, key: jax.Array, batch: Any, tx: optax.GradientTransformation) -> TrainState:
        """New variables (those of `init(key, batch)`) and optimiser state, each stage's on its own devices.

        Args:
          key: a random key.
          batch: a batch `[B, ...]`, as for training.
          tx: any optax transformation; see `jpipe.per_layer` for those that look at single parameters.
        """
        key = batches.as_key(key)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state(batch, tx))
        variables = self.init(key, batch)
        opt_state = jax.jit(tx.init, out_shardings=shardings.opt_state)(variables["params"])
        step, key = jax.device_put((jnp.zeros((), jnp.int32), jax.random.split(key)[1]), shardings.step)
        return TrainState(step, variables, opt_state, key, tx)

    def abstract_state(self, batch: Any, tx: optax.GradientTransformation) -> TrainState:
        """Shapes, dtypes and shardings of `create_state`'s result; computes and allocates nothing.

        For restoring a checkpoint, and for compiling ahead of time, on a mesh of devices that need not be there:
        `jax.jit(pipe.train_step, donate_argnums=0).lower(pipe.abstract_state(batch, tx), batch).compile()`.

        Args:
          batch: a batch `[B, ...]`, or its ShapeDtypeStructs.
          tx: any optax transformation.
        """
        if not isinstance(tx, optax.GradientTransformation | optax.GradientTransformationExtraArgs):
            raise TypeError(f"tx is a {type(tx).__name__}; pass an optax transformation, such as optax.adamw(1e-3)")
        variables = {name: layout.shapes for name, layout in self._plan_for(batch).layouts.items()}
        opt_state = jax.eval_shape(tx.init, variables["params"])
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return TrainState(
            step=jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere),
            variables=variables,
            opt_state=jax.tree.map(place, opt_state, state_shardings(opt_state, variables["params"])),
            key=place(jax.eval_shape(lambda: jax.random.key(0)), everywhere),
            tx=tx,
        )

    def train_step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step of training, compiled as one program; `state` is donated, so don't use it again.

        Returns:
          The new state, and metrics: scalars "loss" and "grad_norm" (of all gradients, before the optimiser).
        """
        if not isinstance(state, TrainState):
            raise TypeError(f"state is a {type(state).__name__}; make it with pipe.create_state(key, batch, tx)")
        self._check_training(state.variables, batch, state.key)
        if state.tx not in self._jit_train_steps:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state(batch, state.tx))
            self._jit_train_steps[state.tx] = jax.jit(
                self._trace_train_step, donate_argnums=0, out_shardings=(shardings, shardings.step)
            )
        return self._jit_train_steps[state.tx](state, batch)

    # --- checks ---

    def _check_training(self, variables: Any, batch: Any, key: Any) -> None:
        plan = self._plan_for(batch)
        batches.check_same_structure("batch", batch, plan.batch)
        self._check_variables(variables)
        missing = set(plan.layouts) - set(variables)
        if missing:
            raise ValueError(f"variables lack the collection {sorted(missing)[0]!r}; pass what pipe.init returned")
        model = self._model(self._shapes(batch))
        if key is None:
            needy = [kind for kind in model.kinds if kind.needs_key]
            if needy:
                raise ValueError(
                    f"layer {needy[0].members[0] - model.first} ({needy[0].layer.name}) draws random numbers, but key=None; "
                    "pass key=jax.random.key(...)"
                )

    def _check_evaluation(self, variables: Any, batch: Any, bare: bool) -> None:
        self._plan_for(batch, bare)
        self._check_variables(variables)
        self._model(self._shapes(batch), bare)

    def _check_variables(self, variables: Any) -> None:
        plan = self._known_plan()
        if not isinstance(variables, dict) or not variables:
            raise TypeError(
                f"variables is a {type(variables).__name__}; pass what pipe.init returned, a dict by collection"
            )
        for name, tree in variables.items():
            if name not in plan.layouts:
                raise ValueError(f"variables have the unknown collection {name!r}; expected {sorted(plan.layouts)}")
            if not isinstance(tree, StageTree):
                raise TypeError(
                    f"variables[{name!r}] is a {type(tree).__name__}, not laid out by a pipeline; "
                    "use pipe.from_layer_variables(trees)"
                )
            if tree.layout != plan.layouts[name]:
                raise ValueError(
                    f"variables[{name!r}] were laid out by another pipeline (num_stages={tree.layout.num_stages}, here "
                    f"{plan.layouts[name].num_stages}; layers, balance or mesh may differ too); translate them: "
                    "pipe.from_layer_variables(other.layer_variables(variables))"
                )
            _check_shapes(f"variables[{name!r}]", tree, plan.layouts[name].shapes)

    # --- planning ---

    def _shapes(self, batch: Any) -> Any:
        return batches.microbatch_shapes(batch, self.schedule.num_microbatches, num_shards(self.mesh))

    def _known_plan(self) -> Plan:
        if self._plan is None:
            raise ValueError(
                "this pipeline has seen no batch yet, so it has no layout; call pipe.init(key, batch) first"
            )
        return self._plan

    def _plan_for(self, batch: Any, bare: bool = False) -> Plan:
        """The plan; made from this batch's shapes if it is the first one."""
        if self._plan is None:
            shapes = self._shapes(batch)
            model = self._model(shapes, bare)
            read, loss_fn = (_itself, None) if bare else (self._read_inputs, self._loss_fn)
            steps = [LayerStep(kind, True, read, loss_fn, self._remat) for kind in model.kinds]
            with shapes_only(self.mesh):
                self._plan = make_plan(
                    model, steps, shapes, balance=self._balance, num_parts=self._num_parts, mesh=self.mesh
                )
        return self._plan

    def _model(self, shapes: Any, bare: bool = False) -> Sequential:
        """The layers traced at the shapes of a micro-batch; checked against the plan."""
        cache = (bare, jax.tree.structure(shapes), tuple((a.shape, a.dtype) for a in jax.tree.leaves(shapes)))
        if cache not in self._models:
            with shapes_only(self.mesh):
                model = trace_kinds(self._layers, shapes if bare else jax.eval_shape(self._read_inputs, shapes))
                if not bare and self._plan is None:
                    self._check_loss(model, shapes)
            if self._plan is not None:
                self._plan.check_model(model)
            self._models[cache] = model
        return self._models[cache]

    def _check_loss(self, model: Sequential, shapes: Any) -> None:
        outputs = model.kinds[model.kind_of[-1]].gives
        loss = jax.eval_shape(self._loss_fn, outputs, shapes)
        parts = loss if isinstance(loss, tuple) else (loss,)
        scalars = [hasattr(part, "shape") and part.shape == () for part in parts]
        if len(parts) > 2 or not all(scalars) or not parts:
            raise ValueError(
                f"loss_fn returned {describe(loss)}; it has to return a scalar (the mean loss) or a pair of scalars "
                "(loss_sum, weight_sum)"
            )
        if not jnp.issubdtype(parts[0].dtype, jnp.floating):
            raise ValueError(f"loss_fn returned a loss of dtype {parts[0].dtype}; it has to be floating-point")

    def _program(self, batch: Any, *, train: bool, with_loss: bool, bare: bool = False) -> Program:
        plan, shapes = self._known_plan(), self._shapes(batch)
        schedule = self.schedule
        if not train:
            sizes = (schedule.num_stages, schedule.num_microbatches, schedule.num_chunks)
            names = ("num_stages", "num_microbatches", "num_chunks")
            schedule = make_schedule("forward", **dict(zip(names, sizes, strict=True)))
        purpose = Purpose(
            train=train,
            read_inputs=_itself if bare else self._read_inputs,
            loss_fn=self._loss_fn if with_loss else None,
            remat=self._remat,
            schedule=schedule,
        )
        with shapes_only(self.mesh):
            return build_program(
                self._model(shapes, bare),
                purpose,
                shapes,
                bounds=plan.bounds,
                storages={name: layout.storage for name, layout in plan.layouts.items()},
                shards=num_shards(self.mesh),
            )

    # --- traced ---

    def _stage(self, program: Program, variables: Any, batch: Any, key: Any) -> Stage:
        split = batches.split_microbatches(batch, self.schedule.num_microbatches)
        axes = batch_axes(self.mesh)
        split = constrain(
            split, jax.tree.map(lambda _: PartitionSpec(None, axes) if axes else PartitionSpec(), split), self.mesh
        )
        return Stage(program, local(variables), split, key, device_index(self.mesh), partial(pin_batch, mesh=self.mesh))

    def _trace_value_and_grad(self, variables: Variables, batch: Any, key: Any) -> Any:
        program = self._program(batch, train=True, with_loss=True)
        layouts = self._known_plan().layouts

        def body(variables: Any, batch: Any, key: Any) -> Any:
            stage = self._stage(program, variables, batch, key)
            storage = program.storages["params"]
            loss, updates, grads = run_training(program, stage, lambda b: constrain_buffers(b, storage, self.mesh))
            return loss, stacked(updates), stacked(grads)

        specs = {name: dict(layout.specs) for name, layout in layouts.items()}
        everywhere = lambda tree: jax.tree.map(lambda _: PartitionSpec(), tree)
        out_specs = (PartitionSpec(), {n: s for n, s in specs.items() if n != "params"}, specs["params"])
        run = on_stages(body, self.mesh, (specs, everywhere(batch), everywhere(key)), out_specs)
        plain = {name: dict(variables[name]) for name in layouts}
        loss, updates, grads = run(plain, batch, key)
        updates = {name: StageTree(tree, layouts[name]) for name, tree in updates.items()}
        return (loss, updates), StageTree(grads, layouts["params"])

    def _trace_forward(self, variables: Variables, batch: Any, *, with_loss: bool, bare: bool) -> Any:
        program = self._program(batch, train=False, with_loss=with_loss, bare=bare)

        def body(variables: Any, batch: Any) -> Any:
            return run_forward(program, self._stage(program, variables, batch, None))

        specs = {name: dict(tree.layout.specs) for name, tree in variables.items()}
        everywhere = lambda tree: jax.tree.map(lambda _: PartitionSpec(), tree)
        out_specs = everywhere(list(program.outputs))
        plain = {name: dict(tree) for name, tree in variables.items()}
        leaves = on_stages(body, self.mesh, (specs, everywhere(batch)), out_specs)(plain, batch)
        if with_loss:
            return leaves[0] / leaves[1]
        structure = jax.tree.structure(program.final.kind.gives)
        return jax.tree.unflatten(structure, list(map(batches.join_microbatches, leaves)))

    def _trace_train_step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(state.key, state.step)
        (loss, updates), grads = self._trace_value_and_grad(state.variables, batch, key)
        params = state.variables["params"]
        changes, opt_state = state.tx.update(grads, state.opt_state, params)
        variables = {"params": optax.apply_updates(params, changes), **updates}
        metrics = {"loss": loss, "grad_norm": global_norm(grads)}
        return state.replace(step=state.step + 1, variables=variables, opt_state=opt_state), metrics

    def _ready_values(self, plan: Plan) -> dict[str, Any]:
        """Buffers with the values of layers that come with their own."""
        leaves: dict[str, dict[int, Any]] = {}
        for index, layer in enumerate(self._layers):
            for name, tree in (layer.ready or {}).items():
                leaves.setdefault(name, {})[index + plan.model.first] = jax.tree.leaves(tree)
        return {name: dict(plan.layouts[name].place(found)) for name, found in leaves.items()}

    @cached_property
    def _jit_init(self) -> Callable:
        layouts = self._known_plan().layouts
        return jax.jit(
            self._trace_init,
            out_shardings={n: jax.tree.map(lambda leaf: leaf.sharding, lay.shapes) for n, lay in layouts.items()},
        )

    def _trace_init(self, key: Any, ready: dict[str, Any]) -> Variables:
        plan = self._known_plan()
        specs = {name: dict(layout.specs) for name, layout in plan.layouts.items()}

        def body(key: Any, ready: Any) -> Any:
            def visit(c: int, member: Any, carry: dict[str, Any]) -> dict[str, Any]:
                return self._init_layer(plan, key, c, member, carry)

            zeros = {name: layout.storage.zeros() for name, layout in plan.layouts.items()}
            buffers = {
                name: constrain_buffers(tree, plan.layouts[name].storage, self.mesh)
                for name, tree in (zeros | local(ready)).items()
            }
            return stacked(plan.layouts["params"].for_each_local(visit, device_index(self.mesh), buffers))

        arguments = (PartitionSpec(), {name: specs[name] for name in ready})
        buffers = on_stages(body, self.mesh, arguments, specs)(key, ready)
        return {name: StageTree(tree, plan.layouts[name]) for name, tree in buffers.items()}

    def _init_layer(self, plan: Plan, key: Any, c: int, member: Any, buffers: dict[str, Any]) -> dict[str, Any]:
        kind = plan.model.kinds[c]
        if kind.layer.ready is not None:
            return buffers
        index = jnp.asarray(np.asarray(kind.members))[member] - plan.model.first
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), kind.takes)
        made = without_mesh(lambda k, x: kind.layer.init(k, positional(x)), jax.random.fold_in(key, index), zeros)
        written = {
            name: plan.layouts[name].storage.write(buffers[name], c, member, jax.tree.leaves(tree))
            for name, tree in made.items()
        }
        return buffers | written


def _itself(batch: Any) -> Any:
    return batch


def _check_item(what: str, own: Any, expected: dict[str, Any]) -> None:
    lacking = [name for name in expected if name not in own]
    if lacking:
        raise ValueError(f"{what} lacks the collection {lacking[0]!r}; got {sorted(own)}")
    for name, tree in expected.items():
        batches.check_same_structure(f"{what}[{name!r}]", own[name], tree)
        _check_shapes(f"{what}[{name!r}]", own[name], tree)


def _check_shapes(what: str, tree: Any, expected: Any) -> None:
    for (path, leaf), want in zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(expected), strict=True):
        shape = np.shape(leaf)
        if shape != want.shape:
            raise ValueError(f"{what}{jax.tree_util.keystr(path)} has the shape {shape}, not {want.shape} as at init")
