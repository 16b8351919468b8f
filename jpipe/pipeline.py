"""`Pipeline`, the class that users meet: it validates and delegates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from os import PathLike

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import Mesh

from jpipe import checks
from jpipe.execution import programs
from jpipe.execution.decoding import PickLogits
from jpipe.execution.generator import as_asked, generate
from jpipe.jax.trees import are_others
from jpipe.layers.adapt import as_layers, as_whole
from jpipe.layers.base import Item
from jpipe.memory import batches
from jpipe.memory.layout import StageTree
from jpipe.memory.records import as_auto, from_items, from_layers, ready_values, to_items, to_layers
from jpipe.model.loss import LossFn
from jpipe.model.merging import check_rules
from jpipe.model.random_keys import as_key, key_shape
from jpipe.model.remat import Policy, as_remat
from jpipe.partitioner.axes import BATCH_AXES
from jpipe.partitioner.splits import make_splits
from jpipe.partitioner.users_mesh import as_mesh
from jpipe.planning.partition import Partition, as_balance, check_sizes
from jpipe.planning.plan import Plan
from jpipe.planning.planner import Planner
from jpipe.planning.request import Request, as_offload
from jpipe.planning.step import Step
from jpipe.processes.progress import first_call, task
from jpipe.processes.tables import Table, Tabular
from jpipe.schedules.orders import make_schedule
from jpipe.schedules.schedule import Schedule
from jpipe.tools.communication import Communication, communication
from jpipe.tools.gradient_check import GradientCheck, Reference, check_gradients
from jpipe.tools.page import Page, facts_of, show
from jpipe.tools.summary import notes_on_room, summarize
from jpipe.training.train_state import TrainState, Variables, abstract_state, make_opt_state, state_to_place, steps_for
from jpipe.types import Batch, Leaf, PyTree

checks.refuse_serialization()


class Pipeline(Tabular):
    """A sequence of layers in K stages, trained with M micro-batches a step (GPipe, arXiv 1811.06965).

    The step equals the sequential model's: same loss, same gradients, same random numbers, whatever the number of
    stages, chunks, the schedule, remat and mesh.

        pipe = jpipe.Pipeline(layers, loss_fn, num_stages=4, num_microbatches=8)
        state = pipe.create_state(key, batch, optax.adamw(1e-3))
        state, metrics = pipe.train_step(state, batch)

    Args:
      layers: a model that is one module (Linen, nnx, a factory of one, or a `jpipe.Layer`), in which jpipe finds the
        layers (`jpipe.layers_of`). Or a sequence of layers: `flax.linen` modules, `nnx` modules or factories
        `lambda rngs: Block(rngs=rngs)`, `jpipe.Layer(init, apply)`, functions of the activations; or a
        `flax.linen.Sequential` or `nnx.Sequential`. A layer maps one pytree of arrays to one; a tuple is passed as
        positional arguments.
      loss_fn: `loss_fn(outputs, batch)` of a micro-batch: its mean loss, or `(loss_sum, weight_sum)`, summed over
        micro-batches and divided once (weights are constants), or these and `metrics`, a dict of scalars (means) or
        pairs `(sum, weight)`, which `train_step` gives divided. A dict of means or pairs, alone or as `(dict,
        metrics)`, is a loss of several means, each over its own weight, which has to follow from the batch. If it has
        a parameter `key`, it gets a random key, the last layer's folded with 0x1055 (None in evaluation, unless one is
        passed). None: the pipeline only applies and generates, and its batches are what `inputs` reads from.
      num_stages: K, the devices along the mesh axis `stage`.
      num_microbatches: M, a divisor of the batch size.
      num_chunks: V, virtual stages a device, for interleaved schedules; 2 for "v".
      schedule: "naive", "gpipe", "1f1b", "interleaved", "v", "zero_bubble", or a `Schedule` of your own.
      remat: "none", "layer", "stage", "full", or a `jax.checkpoint` policy for each layer; see `jpipe.model.remat`.
      balance: how layers are shared among stages: equal "flops", "time", "size" or "even" counts; K*V layer counts as
        integers; or one cost a layer as floats.
      mesh: a mesh with an axis `stage` of K devices. Micro-batches are split over its data axes, weights over any of
        its axes, as their Flax metadata says. Default: the first K devices.
      batch_axes: the mesh's data axes, a name or several in order. Default: its "replica", "data" and "fsdp".
      inputs: batch -> what the model takes, `jpipe.Arguments` if by keyword. A parameter `key` gets a random key, the
        first layer's folded with 0x1A97. Default: `batch["inputs"]`, the first of a tuple, or a bare array.
      merge: rules by collection for variables other than parameters (`jpipe.model.merging`): "mean", "sum", "last",
        "moments", "keep" (only read) or "gradient" (its gradient is its new value). Default: "moments" for
        "batch_stats", "keep" for "frozen", "gradient" for "_overwrite_with_gradient", else the mean of floats and the
        last value of others.
      shard_over: data axes of the mesh over which parameters of some size, and so their optimiser state, are split at
        rest, besides those that metadata names: ("data",) is ZeRO-1 (arXiv 1910.02054).
      gather: when parameters that are split over data axes are gathered: once a "step", or a layer's at each "use".
      ends: weights of the ends lie there ("own") or at rest on all stages ("spread"), or all compute both ("shared").
      offload: what lies in the hosts' memory: "residuals", "boundaries", "optimizer", several, or a share by word.
      loss_over: what a loss of one number is of. Default: the mini-batch, whose parts micro-batches compute; a loss
        that couples examples is an error. "batch": any loss, of all outputs at once (one more forward; arXiv
        2101.06983). "microbatch": each micro-batch has its own, and the mean is taken.
      sown: collections that a Linen or nnx model sows into; its outputs are `(outputs, {"losses": ...})` then.

    Raises:
      ValueError, TypeError: for wrong arguments, before anything is compiled.
    """

    def __init__(
        self,
        layers: object,
        loss_fn: LossFn | None,
        *,
        num_stages: int,
        num_microbatches: int,
        num_chunks: int = 1,
        schedule: str | Schedule = "1f1b",
        remat: str | Policy = "layer",
        balance: str | Iterable[float] = "flops",
        mesh: Mesh | None = None,
        batch_axes: str | Sequence[str] = BATCH_AXES,
        inputs: Callable[..., PyTree] | None = None,
        merge: Mapping[str, str] | None = None,
        shard_over: Sequence[str] = (),
        gather: str = "step",
        ends: str = "own",
        offload: str | Sequence[str] | Mapping[str, float] = (),
        loss_over: str | None = None,
        sown: str | Sequence[str] = (),
    ):
        self._arguments = {name: value for name, value in locals().items() if name != "self"}
        whole, inputs = as_whole(layers, sown), inputs or batches.default_inputs
        layers = () if whole is not None else as_layers(layers)
        checks.check_callable(inputs=inputs, **({} if loss_fn is None else {"loss_fn": loss_fn}))
        sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
        if whole is None:
            check_sizes(num_stages, num_chunks, len(layers))  # before a schedule of so many is made
        self.schedule: Schedule = make_schedule(schedule, **sizes)
        num_stages, num_chunks = self.schedule.num_stages, self.schedule.num_chunks
        self.mesh = as_mesh(mesh, num_stages)
        request = Request(
            layers=layers,
            whole=whole,
            loss_fn=loss_fn,
            read_inputs=batches.without_key(inputs),
            remat=as_remat(remat),
            merge=check_rules(merge),
            balance=as_balance(balance, len(layers) or None, num_stages * num_chunks),
            schedule=self.schedule,
            mesh=self.mesh,
            splits=make_splits(self.mesh, batch_axes, shard_over, gather),
            ends=ends,
            offload=as_offload(offload),
            loss_over=loss_over,
        )
        self.planner = Planner(request)
        self._known: dict = {}  # what a call runs, by `checks.call_of`; what `init` runs, by plan
        # A function of this pipeline's own: what was compiled of it goes when the pipeline goes.
        jit = lambda program, *static: jax.jit(partial(program), static_argnums=static)
        self._train_step_for = steps_for(programs.value_and_grad, self._state_shapes)
        self._jit_value_and_grad, self._jit_evaluate = jit(programs.value_and_grad, 0), jit(programs.evaluate, 0)
        self._jit_apply, self._jit_to_layers = jit(programs.apply, 0, 1), jax.jit(to_layers)
        self._jit_to_model = jax.jit(lambda cut, variables: cut.to_model(to_layers(variables)), static_argnums=0)
        self._jit_generate = jax.jit(partial(generate), static_argnames=("decoding", "num_tokens"))

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.schedule.sizes.items())
        request, plan = self.planner.request, self.planner.plan
        layers = f"{len((plan or request).layers)} layers"
        if request.whole is not None:
            layers = f"{request.whole.name}: {layers if plan else 'cut at the first batch'}"
        return f"Pipeline({layers}, {sizes}, schedule={self.schedule.name!r}, mesh={dict(self.mesh.shape)})"

    def _table(self) -> Table:
        return summarize(repr(self), self.planner)

    def __reduce__(self) -> tuple[Callable[[], Pipeline], tuple[()]]:
        """A copy, or what is unpickled, is made from the same arguments, and sees its first batch anew."""
        return partial(Pipeline, **self._arguments), ()

    @property
    def partition(self) -> Partition:
        """Which layers each virtual stage has, and what they cost. Virtual stage s is chunk s // K of stage s % K.

        A ValueError if costs follow from shapes, and no batch was seen yet.
        """
        return self.planner.partition

    @property
    def plan(self) -> Plan:
        """The layers as traced, cuts and layouts, for tools; a ValueError if no batch was seen yet."""
        return self.planner.known_plan()

    @property
    def data_shard(self) -> tuple[int, int]:
        """`(index, count)`: of each batch cut into `count` equal runs of rows, this process feeds run `index`.

        (0, 1) where each process has devices along all data axes. Those that differ only in stages feed the same rows.
        """
        return batches.data_shard(self.mesh, self.planner.request.splits.batch_axes)

    def place(self, batch: Batch) -> Batch:
        """A batch on the mesh, split over its data axes: global arrays `[B, ...]` from this process's rows, at once.

        Args:
          batch: pytree of arrays `[B / count, ...]` on the host: the rows of `data_shard`. Each process places as many.
        """
        return batches.place_rows(batch, self.mesh, self.planner.request.splits.batch_axes)

    # --- variables ---

    def init(self, key: jax.Array, batch: Batch) -> Variables:
        """New variables by collection, `{"params": ..., "batch_stats": ...}`, each stage's made on its own devices.

        From a random key, for batches like this one `[B, ...]`, whose values don't matter. An nnx module that was
        passed as an instance keeps its own weights, whatever the key; a factory's module is made from the key.
        """
        plan, key = self.planner.plan_for(batch), as_key(key)
        if not isinstance(key, Tracer):
            checks.check_agree(plan, "init", batch, key)
            key = batches.on_all(key, self.mesh)
        jitted = jax.jit(partial(programs.init_variables, plan), out_shardings=plan.shardings)
        with first_call("the initialisation", key) as done, notes_on_room(self.planner, key):
            return done(self._known.setdefault(plan, jitted)(key, ready_values(plan.layouts, plan.layers)))

    def layer_variables(self, variables: Variables) -> list[Item]:
        """Each layer's own variables, in layer order.

        Args:
          variables: anything laid out like this pipeline's variables, gradients too: `{"params": grads}`.

        Returns:
          For a linen layer what `module.init` would have returned, with the boxes of Flax's partitioning metadata if
          its initialisers name axes (`nn.unbox(trees)` gives bare arrays); for an nnx layer a pure dict by collection;
          for a `jpipe.Layer` what its `init` returned. Collections that `variables` lacks are missing. Leaves are split
          over the stages; `jax.experimental.multihost_utils.process_allgather(trees, tiled=True)` gives values on the
          host where a process has only a part (`jax.device_get` where it has all).
        """
        checks.check_variables(self.plan, variables, {})
        return to_items(self.plan.model, self._jit_to_layers(variables))

    def from_layer_variables(self, trees: list[Item], batch: Batch = None) -> Variables:
        """The inverse of `layer_variables`, under this pipeline's layout.

        Args:
          trees: one item a layer, as `layer_variables` of any pipeline of the same layers returns them, with Flax's
            metadata boxes or without; on the host or on devices of this mesh; no tracers. Where all floats of a dtype
            have another, it is the pipeline's from then on.
          batch: needed if this pipeline has seen none yet: shapes decide the partition.
        """
        self._plan_with(batch)
        self.planner, layers = self.planner.read(lambda p, c: from_items(p.known_plan().model, trees, c))
        return from_layers(self.plan.layouts, layers)

    def model_variables(self, variables: Variables) -> Item:
        """The variables (or gradients) of a model that is one module, as its own `init` would have returned them."""
        cut = self.planner.known_cut("layer_variables")
        checks.check_variables(self.plan, variables, {})
        return cut.whole.layer.to_item(as_auto(self._jit_to_model(cut, variables)))

    def from_model_variables(self, tree: Item, batch: Batch = None) -> Variables:
        """The inverse of `model_variables`, under this pipeline's layout; arguments as of `from_layer_variables`."""
        self._plan_with(batch)
        self.planner, trees = self.planner.read(lambda p, c: p.known_cut("from_layer_variables").from_model(tree, c))
        return from_layers({n: at for n, at in self.plan.layouts.items() if n in trees[0]}, trees)

    def modules(self, variables: Variables) -> list[Callable[..., PyTree]]:
        """Each layer as a callable with its variables: an nnx module, a bound linen module, or a function.

        It is called with what the layer itself takes: `(x, kept, side)` if it pops and reads.
        """
        if (whole := self.planner.request.whole) is not None:
            raise ValueError(f"{whole.name} is one module; call it with pipe.model_variables(variables)")
        items = self.layer_variables(variables)
        return [layer.bind(item) for layer, item in zip(self.plan.layers, items, strict=True)]

    # --- computing ---

    def value_and_grad(
        self, variables: Variables, batch: Batch, key: jax.Array | None = None
    ) -> tuple[tuple[jax.Array, Variables], StageTree]:
        """Loss and gradients of the whole batch `[B, ...]`, as `jax.value_and_grad(..., has_aux=True)`.

        Args:
          variables, batch, key: by collection; arrays; a random key, if a layer draws random numbers (dropout).

        Returns:
          `((loss, updates), grads)`: the new collections other than "params"; gradients like `variables["params"]`.
        """
        key = None if key is None else as_key(key)
        step = self._training_step(variables, batch, key)
        run = partial(self._jit_value_and_grad, step)
        (loss, updates, _), grads = self._run("loss and gradients", run, variables, batch, key, trained=step.batch)
        return (loss, {name: tree for name, tree in (variables | updates).items() if name != "params"}), grads

    def apply(self, variables: Variables, batch: Batch, key: Leaf | None = None, *, bare: bool | None = None) -> PyTree:
        """The outputs in evaluation mode, each with a batch axis of B; None for those of one module that no loss reads.

        Args:
          variables, key: by collection; a random key, if a layer draws random numbers in evaluation.
          batch: a batch `[B, ...]`, or the bare inputs that the first layer takes.
          bare: which of the two it is. Default: told by its structure and by its shapes behind the first dimension.

        Raises:
          ValueError: it may be both; or an output has no batch axis, and is no number, sum or mean. One that begins
            with an axis of 1 gives a row for each micro-batch.
        """
        key = None if key is None else as_key(key)
        if (call := checks.call_of((self.planner, f"apply, bare={bare}"), variables, batch, key)) not in self._known:
            checks.check_is_variables(variables)
            micro = self.planner.for_outputs(batch, bare)
            checks.check_complete(self.plan, variables)
            step = self.planner.evaluation_step(micro, key, with_loss=False)
            run = partial(self._jit_apply, step, self.planner.joining(micro))
            checks.check_agree(self.plan, "bare" if micro.bare else "apply", batch, key)
            self._known[call] = run
        return self._run("the forward pass", self._known[call], variables, batch, key)

    def generate(
        self,
        variables: Variables,
        prompts: Leaf,
        num_tokens: int,
        key: jax.Array | None = None,
        temperature: float = 0,
        *,
        prefill: int = 1,
        logits: PickLogits | None = None,
    ) -> jax.Array:
        """Prompts `[B, S]`, at least K, and what follows, `[B, S + num_tokens]`: K micro-batches go round the stages.

        Layers see a token at a time, of prompts `prefill`, a divisor of S (Flax's attention takes one), and keep a
        cache: Linen modules with a field `decode`, nnx modules with attributes `decode` and methods `init_cache`. A
        temperature of 0 takes the likeliest token, others draw by `fold_in(fold_in(key, row), place)` alone. Of a model
        with several outputs `logits(outputs)` says which are the logits `[b, T, vocabulary]`: `lambda out: out[0]`.
        """
        checks.check_complete(self.plan, variables)
        words, options, drawn_by = as_asked(self.planner, prompts, num_tokens, key, temperature, prefill, logits)
        if (call := checks.call_of((self.planner, words), prompts)) not in self._known:
            checks.check_agree(self.plan, words, prompts, key)
            self._known[call] = None
        return self._run("generation", partial(self._jit_generate, **options), variables, prompts, *drawn_by)

    def evaluate(self, variables: Variables, batch: Batch, key: jax.Array | None = None) -> jax.Array:
        """The loss of the whole batch in evaluation mode, forward only. With a key layers draw as in training."""
        key = None if key is None else as_key(key)
        if (call := checks.call_of((self.planner, "evaluate"), variables, batch, key)) not in self._known:
            micro = self.planner.for_evaluation(batch)
            checks.check_complete(self.plan, variables)
            run = partial(self._jit_evaluate, self.planner.evaluation_step(micro, key, with_loss=True))
            checks.check_agree(self.plan, "evaluate", batch, key)
            self._known[call] = run
        return self._run("the loss", self._known[call], variables, batch, key)

    def communication(self, batch: Batch) -> Communication:
        """Lists what devices send in a step of training for a batch `[B, ...]`, or its shapes; to be printed."""
        return communication(self.planner, batch, repr(self))

    def check_gradients(
        self, variables: Variables, batch: Batch, key: jax.Array | None = None, reference: Reference | None = None
    ) -> GradientCheck:
        """Loss and gradients beside the plain model's, to be printed; `agrees`: they differ by rounding alone.

        The plain model runs on one device, in one process, and has to fit it.

        Args:
          variables, batch, key: as of `value_and_grad`.
          reference: `(trees, batch) -> loss` of the whole batch, from trees as of `layer_variables`, for one module as
            of `model_variables`: a model of your own, differentiated by JAX. Default: the layers or the module.
        """
        if reference is not None:
            checks.check_callable(reference=reference)
        (loss, _), grads = self.value_and_grad(variables, batch, key)
        trees, gradients = map(self._jit_to_layers, (self._placed(variables), {"params": grads}))
        return check_gradients(self.planner, trees, batch, key, (loss, gradients), reference, repr(self))

    def view(self, batch: Batch = None, *, path: str | PathLike[str] | None = None) -> Page:
        """A page of sliders with this pipeline's stages, costs and bytes, an HTML file. Nothing is computed for it.

        Args:
          batch: a batch `[B, ...]` or its shapes; default: the first that was seen.
          path: of the file; default: a temporary one. A browser opens it if it can, a notebook shows the result.
        """
        return show(facts_of(self.planner, repr(self), batch), path)

    def create_state(
        self, key: jax.Array, batch: Batch, tx: optax.GradientTransformation, variables: Variables | None = None
    ) -> TrainState:
        """New variables (those of `init(key, batch)`) and optimiser state, each stage's on its own devices.

        Args:
          key: a random key.
          batch: a batch `[B, ...]`, as for training.
          tx: any optax transformation; see `jpipe.per_layer` for those that look at single parameters. One that
            takes the loss as `value` (`reduce_on_plateau`) gets it.
          variables: to start from others, such as `from_layer_variables(trees, batch)`; the state gets a copy of them.
        """
        key = as_key(key)
        plan = self.planner.plan_for(batch)
        if variables is not None:
            checks.check_complete(plan, variables, casts := {})
            if are_others(casts):
                variables = self.from_layer_variables(self.layer_variables(variables))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state(batch, tx))
        if variables is None:
            new = self.init(key, batch)
        else:
            copy = jax.jit(partial(jax.tree.map, jnp.copy), out_shardings=shardings.variables)
            new: Variables = copy(self._placed(variables))
        with task("initialising the optimiser's state"), notes_on_room(self.planner, new, batch, tx):
            opt_state = make_opt_state(tx, new["params"], shardings.opt_state)
        step, key = batches.on_all((jnp.zeros((), jnp.int32), jax.random.split(key)[1]), self.mesh)
        return TrainState(step, new, opt_state, key, tx)

    def abstract_state(
        self, batch: Batch, tx: optax.GradientTransformation, key: jax.Array | None = None
    ) -> TrainState:
        """Shapes, dtypes and shardings of `create_state`'s result, of which nothing is computed.

        For restoring a checkpoint, and for compiling ahead of time, on a mesh of devices that need not be there:
        `jax.jit(pipe.train_step, donate_argnums=0).lower(pipe.abstract_state(batch, tx), batch).compile()`.

        Args:
          batch, tx: a batch `[B, ...]`, or its ShapeDtypeStructs; any optax transformation.
          key: the key of `create_state`, if it isn't of JAX's default implementation (`jax_default_prng_impl`).
        """
        self.planner.plan_for(batch)
        return self._state_shapes(tx, key)

    def place_state(self, state: PyTree, tx: optax.GradientTransformation | None) -> PyTree:
        """The state of a training loop of your own, on the mesh: counters and random keys on all devices.

        A jitted step returns them there; for a state that begins on one device it would be compiled a second time.
        What lies on the mesh stays there; only a state of `create_state` goes to the hosts, or back, by `offload=`.

        Args:
          state: any pytree, such as Flax's `TrainState` or `(tx.init(params), key)`; each process passes the same.
          tx: the optimiser of the loop, checked as by `create_state`; None if there is none.
        """
        checks.check_loop_state(self.plan, state)
        optimizer = None if tx is None else (tx, self.plan.known_loss().of_batch)
        state, shardings = state_to_place(state, self.plan.shapes["params"], optimizer)
        return batches.placed(state, shardings, self.mesh, between_memories=isinstance(state, TrainState))

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step of training, compiled as one function; `state` is donated, so don't use it again.

        It is compiled for each `tx`, as an object: keep the one that you made. The last 8 are kept.

        Returns:
          The new state, and metrics: scalars "loss", "grad_norm" (of all gradients, before the optimiser), "finite"
          (bool, whether both are), and those of the loss function. Where the optimiser skips an update
          (`optax.apply_if_finite`), state other than parameters stays as it was too; `step` counts on.
        """
        checks.check_state(state)
        step = self._training_step(state.variables, batch, state.key)
        checks.check_offload(self.plan, state)
        batch = batches.on_mesh(batch, self.mesh)
        run = self._train_step_for(state.tx, step.plan)
        room = notes_on_room(self.planner, (state, batch), step.batch, state.tx)
        with first_call("the training step", (state, batch)) as done, room:
            return done(run(step, state, batch))

    def _plan_with(self, batch: Batch) -> Plan:
        """The plan, of all processes; it is made for this batch, if it is the first one, and not None."""
        if batch is not None:
            checks.check_agree(self.planner.plan_for(batch), "init", batch)
        return self.plan

    def _training_step(self, variables: Variables, batch: Batch, key: jax.Array | None) -> Step:
        """The step for a batch's shapes; it is made, and all arguments are checked, once for their types."""
        if (call := checks.call_of((self.planner, "train"), variables, batch, key)) not in self._known:
            micro = self.planner.for_training(batch)
            checks.check_complete(self.plan, variables)
            step = self.planner.training_step(micro, key)
            checks.check_step(step, key)
            checks.check_agree(self.plan, "train", batch, key)
            self._known[call] = step
        return self._known[call]

    def _state_shapes(self, tx: optax.GradientTransformation, key: jax.Array | None = None) -> TrainState:
        """Shapes, dtypes and shardings of a state of this plan."""
        return abstract_state(self.plan.shapes, tx, key_shape(key), self.plan.known_loss().of_batch)

    def _run(self, what: str, jitted: Callable, variables: Variables, *given: PyTree, trained: Batch = None) -> PyTree:
        """Calls a jitted program, and returns its results."""
        checks.check_alive("variables", variables)
        arguments = self._placed(variables), *batches.on_mesh(given, self.mesh)
        with first_call(what, arguments) as done, notes_on_room(self.planner, arguments, trained):
            return done(jitted(*arguments))

    def _placed(self, variables: Variables) -> Variables:
        """The variables; what lies on the host is put where it belongs, each stage's on its devices."""
        own = {name: StageTree(tree, self.plan.layouts[name]) for name, tree in variables.items()}
        return batches.placed(own, {name: self.plan.shardings[name] for name in own}, self.mesh)
