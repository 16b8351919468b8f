"""`Planner`: makes the plan from the first batch's shapes, and a step for every batch shape, each once.

    batch ─► MicroBatch ─► Model ─► Plan, of the first batch
                             │        │
                             └────────┴─► Step

Each is a value made from those before it. `for_training`, `for_evaluation` and `for_outputs` are the door: they check a
batch, and cut it. Everything behind them takes the `MicroBatch`, and looks at no batch again.

Only three things on the way use a device or a compiler: timing layers (`balance="time"`), compiling a layer for the
order of its residuals in a TPU's memory, and finding the rates of running averages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache, wraps
from operator import attrgetter
from typing import TypeVar, cast

import jax
import numpy as np

from jpipe.cutting.module import Modes, WholeModel, make_whole, trace_whole
from jpipe.cutting.whole import CutModel, cut_model
from jpipe.jax.primitives import ClosedJaxpr
from jpipe.jax.tracing import equations_in
from jpipe.jax.trees import Casts, are_others, named_leaves
from jpipe.layers.base import AnyLayer, describe, with_dtypes
from jpipe.layers.flax import logical_rules
from jpipe.layers.frozen import FROZEN
from jpipe.memory.batches import (
    MicroBatch,
    check_no_example,
    cut_for_evaluation,
    cut_for_training,
    in_halves,
    is_bare,
    joining,
    lying_by_shapes,
)
from jpipe.memory.records import LayerTrees
from jpipe.model.examples_in_layers import ExamplesInLayers, follow_examples
from jpipe.model.groups import Model
from jpipe.model.layer_function import LayerFunction
from jpipe.model.loss import AVERAGED, TracedLoss, trace_loss
from jpipe.model.random_keys import Key, key_shape
from jpipe.model.trace import trace_model
from jpipe.model.traced_layer import TracedLayer, trace_layer
from jpipe.partitioner.axes import AXIS, shapes_only
from jpipe.partitioner.shardings import PARTIAL, AxisSharding, Partial, Shard
from jpipe.partitioner.splits import Splits
from jpipe.partitioner.users_mesh import check_context
from jpipe.planning.partition import UNITS, Partition, as_balance, cut_layers, unit_of, unmeasured_costs
from jpipe.planning.plan import Plan, make_plan
from jpipe.planning.request import Request
from jpipe.planning.step import Step, make_step
from jpipe.processes.progress import task, warn_once
from jpipe.schedules.orders import forward_only
from jpipe.types import Batch, PyTree, Shapes

Method = TypeVar("Method", bound=Callable)


def once(*names: str) -> Callable[[Method], Method]:
    """Has a `Planner` keep what a method makes in `known`: by its name, its arguments, and what else it follows from.

    Args:
      names: the planner's attributes that decide what is made, besides the model and its loss.
    """
    decisive = attrgetter(*names)

    def keeping(make: Method) -> Method:
        @wraps(make)
        def kept(planner: Planner, *arguments: object, **options: object) -> object:
            key = make.__name__, decisive(planner), arguments, *options.items()
            if key not in planner.known:
                planner.known[key] = make(planner, *arguments, **options)
            return planner.known[key]

        return cast(Method, kept)

    return keeping


class Planner:
    """Makes plan and steps from the batches that a pipeline has seen, each once.

    Args:
      request: what the user asked for.
      casts: of `with_dtypes`.

    Attributes:
      plan: None until a batch was seen.
      cut: of a model that is one module, where it is cut; None until a batch was seen.
      known: what was traced, each under a key of all that it follows from (`once`). Planners of the same layers and
        loss may have one in common; then traces on whole arrays don't show the sizes of `stage` and of data axes,
        unless a layer's code asks for them: it is taken as on the first mesh.
    """

    def __init__(self, request: Request, casts: Sequence[Mapping[str, Casts]] = ()):
        self._asked, self._casts = request, casts
        cast = lambda layer: with_dtypes(layer, casts) if layer and casts else layer
        self.request = replace(request, layers=tuple(map(cast, request.layers)), whole=cast(request.whole))
        self.plan: Plan | None = None
        self.cut: CutModel | None = None
        self._rules: Callable[[], AbstractContextManager[object]] = nullcontext
        self._forget()

    def _forget(self) -> None:
        """Forgets what was traced and laid out, but for the plan; other planners keep what they have in common."""
        self.known: dict = {}
        self._step = cache(self._make_step)

    def cast(self, casts: Mapping[str, Casts]) -> Planner:
        """A planner of the same model with variables of other dtypes, by collection; this one if they are its own."""
        if not are_others(casts):
            return self
        planner = Planner(self._asked, (*self._casts, casts))
        with self._rules():
            planner.plan_for(self.known_plan().batch)
        return planner

    def read(self, read: Callable[[Planner, dict[str, Casts]], LayerTrees]) -> tuple[Planner, LayerTrees]:
        """(The planner for a user's trees, these as `read`, which adds their dtypes to its last argument)."""
        trees = read(self, casts := {})
        planner = self.cast(casts)
        return planner, trees if planner is self else read(planner, {})

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """The context in which layers are traced: `shapes_only`, under the logical axis rules of the first batch."""
        with shapes_only(self.request.mesh), self._rules():
            yield

    # --- batch -> micro-batch ---

    def for_training(self, batch: Batch) -> MicroBatch:
        """The micro-batches of a training batch `[B, ...]`, as shapes. The first batch makes the plan.

        Raises:
          ValueError: there is no loss to train with; the batch has another structure than the first one, or is a single
            example.
          TypeError, ValueError: as of `cut_for_training`; or the first batch can't be planned for.
        """
        self.request.check_has_loss()
        return cut_for_training(batch, *self._sizes, self.plan_for(batch).model.batch)

    def for_evaluation(self, batch: Batch) -> MicroBatch:
        """The micro-batches of an evaluation batch of any size; errors as of `for_training`, but for the size."""
        return cut_for_evaluation(batch, *self._sizes, self.plan_for(batch).model.batch)

    def for_outputs(self, batch: Batch, bare: bool | None = None) -> MicroBatch:
        """The micro-batches of a batch of any size, or of the model's bare inputs, for its outputs.

        Args:
          batch: either.
          bare: which of the two it is; None to find out.

        Raises:
          TypeError: `bare` is no bool.
          ValueError: as of `is_bare`; a layer reads from the batch, and there is none; it is a single example.
        """
        if bare is not None and not isinstance(bare, bool | np.bool_):
            raise TypeError(f"bare={bare!r} is no bool; pass True for the model's inputs, False for a whole batch")
        seen = self.plan_for(batch).model
        bare = bool(is_bare(batch, seen.batch, seen.inputs, self.request.read_inputs, bare))
        side = [f"layer {i} ({layer.name})" for i, layer in enumerate(self.request.layers) if layer.reads_batch]
        if bare and side:
            raise ValueError(f"{side[0]} reads a side input; pass the whole batch, not its inputs")
        check_no_example(batch, seen.inputs if bare else seen.batch)
        return cut_for_evaluation(batch, *self._sizes, bare=bare)

    @property
    def _sizes(self) -> tuple[int, int]:
        """M, and the devices that each micro-batch is split over."""
        return self.request.schedule.num_microbatches, self.request.splits.num_shards

    # --- micro-batch -> model ---

    @once("request.splits", "cut")
    def model(self, micro: MicroBatch) -> Model:
        """The layers traced at a micro-batch's shapes, checked against the plan if there is one."""
        model = self._traced(micro, self.request.splits)
        if self.plan is not None:
            self.plan.check_model(model)
        return model

    def _traced(self, micro: MicroBatch, splits: Splits) -> Model:
        rules, like = self.request.rules, None if self.plan is None else self.plan.model
        known = self.known.setdefault(("calls", self._whole_arrays, micro), {})
        traces = dict(known)
        with self.tracing():
            layers = self.request.layers if self.cut is None else self._pieces(micro)
            with task(f"tracing {len(layers)} layers"):
                model = trace_model(layers, self._read(micro), micro.shapes, splits, rules, like, traces)
        known.update({i: trace for i, trace in traces.items() if not _has_parts(trace.jaxpr)})
        return model

    def _read(self, micro: MicroBatch) -> Callable[[Batch], PyTree]:
        return (lambda inputs: inputs) if micro.bare else self.request.read_inputs

    @property
    def _whole_arrays(self) -> tuple[object, ...]:
        """All that decides traces on whole arrays.

        The mesh's size, since equations hold a mesh of as many devices, and the sizes of its axes but `stage` and the
        data axes.
        """
        mesh, names = self.request.mesh, (AXIS, *self.request.splits.batch_axes)
        return self.cut, mesh.size, tuple(pair for pair in mesh.shape.items() if pair[0] not in names)

    @once("request.splits", "cut")
    def examples(self, micro: MicroBatch) -> ExamplesInLayers:
        """Says what the layers do to a micro-batch's examples."""
        return follow_examples(self.model(micro))

    @once("request.splits", "cut")
    def outputs_lie(self, micro: MicroBatch) -> list[AxisSharding]:
        """How a micro-batch lies in each leaf of the outputs of all of them, replicated where examples have no axis.

        Micro-batches have a number of the model's own as parts of a sum or of a mean.

        Raises:
          ValueError: it is neither, or the model can't be traced for all examples, which would tell.
        """
        found, lying = self.examples(micro), list(self._lying(micro))
        whole = follow_examples(self._needed(micro, micro.count)) if PARTIAL in found.outputs else found
        for leaf, (at, follows) in enumerate(zip(lying, found.follows, strict=True)):
            if isinstance(at, Shard) or not follows:
                continue
            is_sum = False if found.couplings else None  # a mean, where layers are marked that couple examples
            if found.outputs[leaf] == PARTIAL:
                is_sum = found.is_sum(whole, micro.count, leaf)
            if is_sum is None:
                name, _ = named_leaves("outputs", self.model(micro).groups[-1].gives)[leaf]
                raise ValueError(f"{name} has no examples, and is neither their sum nor mean; return its terms")
            lying[leaf] = PARTIAL if is_sum else AVERAGED
        return lying

    def _lying(self, micro: MicroBatch) -> list[AxisSharding]:
        """How examples lie in each leaf of the outputs, by the layers' operations, or by shapes where these couple."""
        found, last = self.examples(micro), self.model(micro).groups[-1]
        if found.is_certain or (twice := self._enlarged(micro, 2)) is None:
            return found.outputs
        return lying_by_shapes(last.gives, twice.groups[-1], found.outputs, micro.size)

    @once("request.splits", "cut")
    def joining(self, micro: MicroBatch) -> tuple[AxisSharding, ...]:
        """How a micro-batch lies in each leaf of the outputs of all, as `apply` joins them."""
        found = self.examples(micro)
        if not found.is_certain:
            self._needed(micro, 2)
        lying, gives = list(self._lying(micro)), self.model(micro).groups[-1].gives
        for i, (at, leaf) in enumerate(zip(lying, jax.tree.leaves(gives), strict=True)):
            # A number of them all, and what is surely a sum, a mean, or the same for all, has no examples to be joined.
            alone = not leaf.shape or found.outputs[i] == PARTIAL or not found.follows[i]
            if alone and leaf.shape[:1] != (1,) and not isinstance(at, Shard):
                of_all = self.outputs_lie(micro)[i] if micro.count > 1 else AVERAGED
                lying[i] = of_all if isinstance(of_all, Partial) else AVERAGED
        return joining(gives, lying, micro.size)

    @once("request.splits", "cut")
    def _enlarged(self, micro: MicroBatch, factor: int) -> Model | None:
        """The model for `factor` times as many examples, `in_halves` if that can be; None if it can't take them."""
        halves = in_halves(self.request.mesh)
        # Layers that need this mesh (`shard_map`) are traced over it, and then where halves lie isn't known. A model
        # that takes micro-batches of one size alone can't be traced at all.
        for splits in (halves, self.request.splits):
            with suppress(Exception):
                model = self._traced(micro.enlarged(factor), splits)
                last = model.groups[-1]
                same = jax.tree.structure(last.gives) == jax.tree.structure(self.model(micro).groups[-1].gives)
                lies = last.gives_at if splits is halves else [()] * len(last.gives_at)
                return replace(model, groups=(*model.groups[:-1], replace(last, gives_at=lies))) if same else None
        return None

    def _needed(self, micro: MicroBatch, factor: int) -> Model:
        """The model as of `_enlarged`; a ValueError if it can't take so many examples."""
        model, size = self._enlarged(micro, factor), factor * micro.size
        if model is None:
            raise ValueError(f"the model can't be traced for {size} examples; let it take any batch size")
        return model

    @once("request.splits", "cut")
    def loss(self, micro: MicroBatch, *, with_key: bool = True) -> TracedLoss | None:
        """The loss that follows a micro-batch, checked; None if there is none. In evaluation there may be no key."""
        loss_fn, over = self.request.loss_fn, self.request.loss_over
        if loss_fn is None:
            return None
        if not with_key and (training := self.loss(micro)) and not training.takes_key:
            return training
        outputs = self.model(micro).groups[-1].gives
        lying = [] if micro.count == 1 or over == "microbatch" else self.outputs_lie(micro)
        with self.tracing():
            if self.cut is not None:
                loss_fn = self.cut.loss(loss_fn, self._whole(micro)[1].outputs, micro.shapes)
            options = {"lying": lying, "count": micro.count, "over": over, "with_key": with_key}
            return trace_loss(loss_fn, outputs, micro.shapes, **options)

    def layers(self, micro: MicroBatch, key: jax.ShapeDtypeStruct) -> tuple[TracedLayer, ...]:
        """The layers of each group in training, for a type of random keys."""
        remat = self.request.remat.keep_inputs, id(self.request.remat.policy)  # a policy of the user's may have no hash
        place = "layers", self.request.splits, self.cut, remat, micro, key
        if place in self.known:
            return self.known[place]
        functions, layers = self._functions(micro, key, train=True, with_loss=True), []
        progress = task("tracing forward and backward", total=len(functions), unit="groups of layers")
        with self.tracing(), progress as advance:
            for function in functions:
                alone = "layer", self._whole_arrays, remat, micro, key, function.group.indices
                layer = self.known.get(alone) or trace_layer(function)
                if not _has_parts(layer.forward, layer.backward):
                    self.known[alone] = layer
                layers.append(replace(layer, function=function))
                advance()
        return self.known.setdefault(place, tuple(layers))

    def _functions(self, micro: MicroBatch, key: Shapes | None, *, train: bool, with_loss: bool) -> list[LayerFunction]:
        """The functions that the layers of each group compute; the loss follows the last."""
        model, remat = self.model(micro), self.request.remat
        loss = (self.loss(micro) if key is not None else self.loss(micro, with_key=False)) if with_loss else None
        of = lambda g: loss if g == model.last else None
        return [LayerFunction(group, key, remat, model.batch, of(g), train) for g, group in enumerate(model.groups)]

    # --- model -> plan ---

    @property
    def partition(self) -> Partition:
        """The cuts, as far as they are known.

        Raises:
          ValueError: the costs follow from shapes, and no batch was seen yet.
        """
        if self.plan is not None:
            return self.plan.partition
        balance, layers = self.request.balance, self.request.layers
        if balance in UNITS or not layers:
            raise ValueError(f"balance={balance!r} follows from the batch's shapes; call pipe.init(key, batch) first")
        return cut_layers(balance, unmeasured_costs(balance, len(layers)), self.request.schedule)

    def known_plan(self) -> Plan:
        """The plan, which a batch has to have decided already."""
        if self.plan is None:
            raise ValueError("this pipeline has seen no batch yet; call pipe.init(key, batch) first, or pass a batch")
        return self.plan

    def known_cut(self, instead: str) -> CutModel:
        """Where a model that is one module is cut; for a list of layers a ValueError with what to call instead."""
        if self.request.whole is None:
            raise ValueError(f"this pipeline was given a list of layers, not one module; call pipe.{instead}")
        self.known_plan()
        assert self.cut is not None
        return self.cut

    def plan_for(self, batch: Batch) -> Plan:
        """The plan; made from this batch's shapes, if it is the first one. Of other batches nothing is looked at."""
        check_context(self.request.mesh)
        if self.plan is not None:
            return self.plan
        self._rules = logical_rules({*self.request.mesh.axis_names} - {AXIS})  # Flax's of now
        cut = cut_for_evaluation if self.request.loss_fn is None else cut_for_training
        micro = cut(batch, *self._sizes)
        try:
            self.plan = self._first_plan(micro)
            if self.request.shares_ends and self.request.loss_fn is not None:
                self.training_step(micro)  # which refuses ends that can't be shared, before anything is compiled
        except BaseException:
            self.plan = self.cut = None
            self._forget()  # what was traced before the error may be traced under other rules next time
            raise
        return self.plan

    @once("request.mesh")
    def _whole(self, micro: MicroBatch) -> tuple[WholeModel, Modes]:
        """A model that is one module, and its traces; of the first batch also which outputs its loss reads."""
        asked, read = self.request, self._read(micro)
        if self.cut is not None:
            return self.cut.whole, self.cut.whole.trace(read, micro.shapes)
        assert asked.whole is not None
        return trace_whole(asked.whole, asked.loss_fn, read, micro.shapes)

    @once("request.mesh")
    def _cut(self, micro: MicroBatch, wanted: int) -> CutModel:
        """Where it is cut into so many pieces or more; the same object for all numbers that give the same pieces."""
        cut = cut_model(*self._whole(micro), wanted)
        return self.known.setdefault((self.request.mesh, micro, cut.cutting), cut)

    @once("cut")
    def _pieces(self, micro: MicroBatch) -> tuple[AnyLayer, ...]:
        assert self.cut is not None
        return self.cut.layers(self._whole(micro)[1])

    def _first_plan(self, micro: MicroBatch) -> Plan:
        asked, of_module = self.request, self.request.whole is not None
        virtual_stages = asked.schedule.num_stages * asked.schedule.num_chunks
        with self.tracing(), task("cutting the model") if of_module else nullcontext():
            self.cut = self._cut(micro, virtual_stages) if of_module else None
            listed = self._pieces(micro) if of_module else asked.layers
        as_balance(asked.balance, len(listed), virtual_stages)  # as is known only now of one module
        with task(f"planning {len(listed)} layers"):
            model, loss = self.model(micro), self.loss(micro)
            self._check_state(micro, model)
            # With keys of the default implementation, so that equal pipelines are cut alike whatever keys come.
            layers = self.layers(micro, key_shape()) if unit_of(asked.balance) else ()
            if loss is not None and micro.count > 1:
                for line in self.examples(micro).in_words(model, statistics=False):
                    warn_once(f"{line}; with num_microbatches={micro.count} it sees {micro.size}, not the mini-batch")
            return make_plan(asked, listed, model, loss, layers, self.cut)

    def _check_state(self, micro: MicroBatch, model: Model) -> None:
        """Refuses state with rows for examples, which would be merged with those of other micro-batches.

        So a model with state is traced for twice as many examples; one that takes no others isn't refused.
        """
        asked, twice, faults = self.request, micro.enlarged(2).shapes, list[str]()
        if micro.count == 1 or not any({*group.variables} - {"params", FROZEN} for group in model.groups):
            return
        named = lambda m: {f"layer {i} ({layer.name})": m.group_at(i).variables for i, layer in enumerate(asked.layers)}
        with suppress(Exception), self.tracing():
            if self.cut is None:
                trees = named(model), named(trace_model(asked.layers, asked.read_inputs, twice, rules=asked.rules))
            else:
                whole = self.cut.whole
                train = whole.init is not None and whole.init.train
                trees = whole.variables, make_whole(whole.layer, asked.read_inputs, twice, train=train).variables
            pairs = zip(*(named_leaves("variables", tree) for tree in trees), strict=True)
            faults = [f"{path} is {describe(a)}, {describe(b)}" for (path, a), (_, b) in pairs if a.shape != b.shape]
        if faults:
            raise ValueError(f"{faults[0]} for twice as many examples; pass it in the batch, or use num_microbatches=1")

    # --- plan -> step ---

    def training_step(self, micro: MicroBatch, key: Key | None = None) -> Step:
        """The step of training for a batch's shapes and a type of random keys.

        It is kept: the order of its residuals in memory may have taken a compilation.
        """
        return self._step(micro, key_shape(key), train=True, with_loss=True)

    def evaluation_step(self, micro: MicroBatch, key: Key | None = None, *, with_loss: bool) -> Step:
        """The step forward only, whose outputs the loss may follow; a ValueError if there is none, or no needed key."""
        if with_loss:
            self.request.check_has_loss()
        return self._step(micro, None if key is None else key_shape(key), train=False, with_loss=with_loss)

    def _make_step(self, micro: MicroBatch, key: jax.ShapeDtypeStruct | None, *, train: bool, with_loss: bool) -> Step:
        """A step with random keys of a type, or without; in training one with a backward, if the loss follows."""
        layers = self.layers(micro, key) if train and with_loss and key is not None else ()
        traced = [layer.function for layer in layers]
        functions = traced or self._functions(micro, key, train=train, with_loss=with_loss)
        schedule, outputs, loss = self.request.schedule, None, functions[-1].loss
        if not layers:
            schedule = forward_only(**{**schedule.sizes, "num_microbatches": micro.count}, style=schedule.style)
        if loss is not None and loss.at_once is not None:
            outputs = self._step(micro, key, train=train, with_loss=False)
        with self.tracing():
            plan, model = self.known_plan(), self.model(micro)
            return make_step(plan, model, schedule, functions, layers, self.known, outputs=outputs)


def _has_parts(*jaxprs: ClosedJaxpr) -> bool:
    """Whether jaxprs on whole arrays hold others on one device's parts, whose shapes follow from the mesh."""
    return any(one.primitive.name == "shard_map" for closed in jaxprs for one in equations_in(closed.jaxpr.eqns))
