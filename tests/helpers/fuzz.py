"""Random models on random meshes against plain Flax: every gradient leaf, the loss, state and outputs in float64.

A case follows from its seed alone. Layers come from `fuzz_layers`, the truth from `sequential`; no mesh and nothing of
jpipe's programs takes part in it.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh

import fuzz_layers as kinds
import jpipe
import sequential
from cases import assert_close, one_slot, take_microbatch
from device_programs import devices_of, programs_of
from fuzz_layers import RATE, STEPS, VOCABULARY, WIDE, Scope, finished, over
from timed import alive

TOLERANCES = {"float64": 5e-11, "float32": 5e-6}
"""Of each element and of the leaf's largest one."""
KEY = 7
MESHES = (
    ((2,), ("stage",)),
    ((4,), ("stage",)),
    ((2, 2), ("stage", "data")),
    ((4, 2), ("stage", "data")),
    ((2, 3), ("stage", "data")),
    ((2, 2), ("data", "stage")),
    ((2, 4), ("data", "stage")),
    ((2, 2), ("stage", "model")),
    ((2, 4), ("stage", "model")),
    ((3, 2), ("stage", "model")),
    ((2, 2, 2), ("stage", "fsdp", "tp")),
    ((2, 1, 2), ("stage", "fsdp", "tp")),
    ((2, 4, 1), ("stage", "fsdp", "tp")),
    ((2, 2, 2), ("replica", "stage", "data")),
    ((1, 2), ("stage", "data")),
    ((1, 2), ("stage", "model")),
    ((1, 2, 2), ("stage", "fsdp", "tp")),
)
REMATS = ("none", "layer", "stage", "full", "policy")


@dataclass(frozen=True)
class Case:
    """A model, its data, and how it is run.

    Attributes:
      layers: as users write them.
      loss_fn: of outputs and batch.
      batch: arrays `[M * b, ...]`.
      mesh: shape and names of the mesh's axes.
      explicit: whether its axes are Explicit.
      set_mesh: whether it is in context.
      options: further arguments of `Pipeline`.
      names: what the layers are, for people.
    """

    layers: list
    loss_fn: Callable
    batch: dict[str, np.ndarray]
    mesh: tuple[tuple[int, ...], tuple[str, ...]]
    explicit: bool
    set_mesh: bool
    options: dict[str, Any]
    names: list[str]

    def make_mesh(self) -> Mesh:
        """The mesh on this process's devices."""
        shape, names = self.mesh
        kind = AxisType.Explicit if self.explicit else AxisType.Auto
        devices = np.asarray(jax.devices()[: int(np.prod(shape))]).reshape(shape)
        return Mesh(devices, names, axis_types=(kind,) * len(names))

    def __str__(self) -> str:
        axes = ", ".join(f"{name}={size}" for size, name in zip(*self.mesh, strict=True))
        kind = ("Explicit" if self.explicit else "Auto") + (", in context" if self.set_mesh else "")
        shapes = {name: a.shape for name, a in self.batch.items()}
        return f"mesh {axes} ({kind}); {self.options}; batch {shapes}; layers {', '.join(self.names)}"


# --- models -----------------------------------------------------------------------------------------------------------


@dataclass
class Builder:
    """A list of layers on its way.

    Attributes:
      s: choices, and the layout at hand.
      layers, names: so far.
      beside: what travels beside the activations: "aux", a scalar, or "bias", `[1, D]`.
      kept: the names of skips that are not popped yet.
      shared: a shared layer, and how many values pass by it.
      stash_rate: how often a layer's output is kept for later.
    """

    s: Scope
    layers: list = field(default_factory=list)
    names: list = field(default_factory=list)
    beside: list = field(default_factory=list)
    kept: list = field(default_factory=list)
    skips: int = 0
    shared: Any = None
    stash_rate: float = 0.12

    def add(self, layer: Any, name: str) -> None:
        self.layers.append(layer)
        self.names.append(name)

    def add_over(self, layer: Any, name: str) -> None:
        """A layer of the activations alone."""
        if not isinstance(layer, type(jpipe.stash(len, "a"))):  # one that reads the batch sees all of them
            layer = finished(over(layer, len(self.beside)))
        if len(self.kept) < 2 and self.s.rng.random() < self.stash_rate:
            self.skips += 1
            self.kept.append(f"skip {self.skips}")
            layer, name = jpipe.stash(layer, self.kept[-1]), f"stash({name})"
        self.add(layer, name)

    def step(self) -> None:
        """One more layer, or a few."""
        options = [(self.layer, 9), (self.use_shared, 1.5)]
        options += [(self.change, 4)] if kinds.CHANGES[self.s.layout] else []
        options += [(self.put_beside, 2)] if len(self.beside) < 2 else []
        options += [(self.use_beside, 2)] if self.beside else []
        options += [(self.pop, 2)] if self.kept else []
        options += [(self.reshapes, 1)] if self.s.layout == "features" else []
        weights = np.asarray([weight for _, weight in options], float)
        options[int(self.s.rng.choice(len(options), p=weights / weights.sum()))][0]()

    def layer(self) -> None:
        """Any layer for the layout at hand."""
        make = self.s.pick(kinds.ANYWHERE + kinds.OF_LAYOUT[self.s.layout])
        self.add_over(make(self.s), make.__name__)

    def change(self) -> None:
        """Another layout."""
        self.change_to(*self.s.pick(kinds.CHANGES[self.s.layout]))

    def change_to(self, layout: str, make: Callable[[int], Callable]) -> None:
        """The new layout, by a function of `fuzz_layers.CHANGES`."""
        self.add_over(make(self.s.width), f"to {layout}")
        self.s = replace(self.s, layout=layout)

    def reshapes(self) -> None:
        """Boundaries of many shapes, which travel in one flat buffer."""
        d, count = self.s.width, len(self.beside)
        for shape in ((2, d // 2), (d // 2, 2), (d, 1), (1, d), (1, 2, d // 2), (2, 1, d // 2), (d,)):
            view = lambda x, shape=shape: x.reshape(x.shape[0], *shape) * 1.5
            self.add(over(view, count), f"to {shape}")

    def put_beside(self, what: str | None = None) -> None:
        """One more value beside the activations: "aux", "zero" (scalars) or "bias"."""
        s = self.s
        what = what or s.pick(["aux", "zero", "bias"])
        if what == "aux":
            self.add(lambda x, *others: (x, *others, jnp.square(x).mean()), "put aux")
        elif what == "zero":
            self.add(lambda x, *others: (x, *others, jnp.zeros((), x.dtype)), "put zero")
        else:
            init = lambda key, x, *others: jax.random.normal(key, (1, s.width), WIDE)
            self.add(jpipe.Layer(init, lambda p, x, *others: (x, *others, p)), "put bias")
        self.beside.append("bias" if what == "bias" else "aux")

    def use_beside(self) -> None:
        """The activations and the values beside them change each other."""
        kind = self.beside[-1]
        if kind == "aux":
            self.add(lambda x, *o: (x, *o[:-1], o[-1] + jnp.square(x).mean()), "add to aux")
        elif self.s.rng.random() < 0.5:
            self.add(lambda x, *o: (x + o[-1], *o[:-1], jnp.tanh(o[-1])), "use bias")
        else:
            single = len(self.beside) == 1
            self.add(lambda x, *o: x + o[-1] if single else (x + o[-1], *o[:-1]), "end of bias")
            self.beside.pop()

    def pop(self) -> None:
        """The end of a skip; the kept value may have another layout by now, so its mean is added."""
        self.add(jpipe.pop(_add_kept, self.kept.pop()), "pop")

    def use_shared(self) -> None:
        count = len(self.beside)
        if self.shared is None:
            layer = over(self.s.pick([kinds.dense, kinds.split_block, kinds.plain_layer])(self.s), count)
            self.shared = jpipe.Shared(layer), count
        if self.shared[1] == count:
            self.add(self.shared[0], "shared")
        else:
            self.add_over(kinds.dense(self.s), "dense")

    def end(self, table: Any) -> None:
        """Pops what is kept, and gives outputs with examples first."""
        while self.kept:
            self.pop()
        layout, leave = self.s.layout, self.s.rng.random() < 0.4
        first = {"time": lambda x: x.swapaxes(0, 1), "folded": lambda x: x.reshape(-1, STEPS, x.shape[-1])}
        first["time folded"] = lambda x: x.reshape(STEPS, -1, x.shape[-1]).swapaxes(0, 1)
        turn = first.get(layout, lambda x: x)
        if self.beside or layout in first:
            self.add(_ending(turn, leave), "end" + " with aux" * (leave and bool(self.beside)))
        if table is not None and not (leave and self.beside):
            self.add(table.using("attend"), "attend")


def _add_kept(x: Any, kept: Any) -> Any:
    amount = sum(jnp.mean(leaf) for leaf in jax.tree.leaves(kept))
    kept = kept[0] if isinstance(kept, tuple) else kept
    main, others = (x[0], x[1:]) if isinstance(x, tuple) else (x, None)
    main = main + kept if main.shape == kept.shape else main + amount
    return main if others is None else (main, *others)


def _ending(turn: Callable, leave: bool) -> Callable:
    def end(x, *others):
        total = sum(jnp.mean(leaf) for leaf in others) if others else 0
        return (turn(x), total[None]) if leave and others else turn(x) + total

    return end


def build(rng: np.random.Generator, names: tuple[str, ...], plain: bool, count: int) -> tuple[Builder, str]:
    """Layers, and what the inputs are: "tokens", "features" or "image"."""
    s = Scope(rng, names, plain, int(rng.choice([4, 8])), "features")
    b, inputs, table = begin(s, s.pick(["tokens", "tokens", "features", "sequence", "image"]))
    while len(b.layers) + len(b.kept) + bool(b.beside) < count:
        b.step()
    b.end(table)
    return b, inputs


def begin(s: Scope, start: str) -> tuple[Builder, str, Any]:
    """The first layers; what the inputs are; and a shared table, if the model ends with it.

    Args:
      s: choices.
      start: "tokens", "features", "sequence" (made from features), or "image".
    """
    layout = {"tokens": "sequence", "sequence": "sequence", "image": "image"}.get(start, "features")
    b, width, table = Builder(replace(s, layout=layout)), s.width, None
    if start == "tokens":
        split = s.dims(2) if s.rng.random() < 0.6 else None
        init = nn.initializers.normal(1.0)
        init = nn.with_partitioning(init, split) if split else init
        embed = nn.Embed(VOCABULARY, width, param_dtype=WIDE, dtype=WIDE, embedding_init=init)
        table = jpipe.Shared(embed) if s.rng.random() < 0.4 else None
        b.add(table or embed, "shared " * (table is not None) + f"embed {split or ''}")
    elif start == "features":
        b.add(nn.Dense(width, param_dtype=WIDE), "dense")
    elif start == "sequence":
        b.add(nn.Dense(STEPS * width, param_dtype=WIDE), "dense")
        b.add(lambda x: x.reshape(x.shape[0], STEPS, width), "reshape")
    else:
        b.add(nn.Conv(width, (3, 3), param_dtype=WIDE), "conv")
    return b, "features" if start == "sequence" else start, table


def random_loss(kind: str) -> Callable:
    """A loss function: "mean", "weighted", "contrastive" or "balance"."""

    def loss_fn(outputs, batch):
        y, (aux,) = outputs if isinstance(outputs, tuple) else (outputs, jnp.zeros(1, outputs.dtype))
        z = jnp.tanh(y).reshape(y.shape[0], -1)
        errors = jnp.square(z - batch["target"][:, None]).mean(1)
        if kind == "weighted":
            return (batch["weight"] * (errors + 0.1 * aux)).sum(), batch["weight"].sum()
        loss = errors.mean() + 0.1 * aux
        if kind == "contrastive":
            loss = loss - jnp.diag(jax.nn.log_softmax(z @ z.T)).mean()
        if kind == "balance":
            share = jax.nn.softmax(y).reshape(-1, y.shape[-1]).mean(0)
            loss = loss + (share * jax.lax.stop_gradient(share) * len(share)).sum()
        return loss

    return loss_fn


def random_batch(rng: np.random.Generator, inputs: str, size: int) -> dict[str, np.ndarray]:
    """Inputs, a mask, and targets and unequal weights by example."""
    values = {
        "tokens": lambda: rng.integers(0, VOCABULARY, (size, STEPS)).astype(np.int32),
        "features": lambda: rng.normal(size=(size, 4)),
        "image": lambda: rng.normal(size=(size, 4, 4, 2)),
    }[inputs]()
    mask = (np.arange(STEPS) < rng.integers(1, STEPS + 1, size)[:, None]).astype(np.float64)
    weight = mask.sum(1) * np.arange(1, size + 1)
    return {"inputs": values, "mask": mask, "target": rng.uniform(-1, 1, size), "weight": weight}


# --- cases ------------------------------------------------------------------------------------------------------------


def make_case(seed: int, plain: bool = False) -> Case:
    """The case of a seed.

    Args:
      seed: decides everything.
      plain: its layers for the reference, which know no mesh; all else is the same.
    """
    rng = np.random.default_rng(seed)
    shape, names = MESHES[seed % len(MESHES)]
    sizes = dict(zip(names, shape, strict=True))
    k, m = sizes["stage"], int(rng.integers(1, 5))
    chunks = int(rng.choice([1, 1, 1, 2, 3])) if k <= 2 else 1
    order = str(rng.choice(["1f1b", "1f1b", "gpipe", "naive", "one slot", "interleaved"]))
    order = "interleaved" if chunks > 1 else order
    count = max(int(rng.integers(4, 10)), k * chunks)
    built, inputs = build(rng, names, plain, count)
    shards = int(np.prod([sizes.get(name, 1) for name in ("replica", "data", "fsdp")]))
    # A norm of two examples is 1 and -1 whatever they are, and its gradients are what rounding leaves.
    least = 4 if any("batch_norm" in name for name in built.names) else 2
    size = m * shards * -(-least // shards) * int(rng.integers(1, 3))
    options = {
        "num_stages": k,
        "num_microbatches": m,
        "num_chunks": chunks,
        "schedule": order,
        "remat": str(rng.choice(REMATS)),
        "balance": _random_counts(rng, len(built.layers), k * chunks) if rng.random() < 0.4 else "even",
    }
    loss = str(rng.choice(["mean", "weighted", "contrastive", "balance"]))
    explicit, set_mesh = bool(rng.integers(2)), bool(rng.random() < 0.3)
    batch = random_batch(rng, inputs, size)
    layers_and_loss = [*built.names, f"loss {loss}"]
    return Case(built.layers, random_loss(loss), batch, (shape, names), explicit, set_mesh, options, layers_and_loss)


def _random_counts(rng: np.random.Generator, total: int, parts: int) -> list[int]:
    cuts = sorted(rng.choice(np.arange(1, total), parts - 1, replace=False)) if parts > 1 else []
    return [int(n) for n in np.diff([0, *cuts, total])]


def make_pipe(case: Case, mesh: Mesh) -> jpipe.Pipeline:
    """The pipeline of a case."""
    options = dict(case.options)
    if options["schedule"] == "one slot":
        options["schedule"] = one_slot(options["num_stages"], options["num_microbatches"])
    if options["remat"] == "policy":
        options["remat"] = jax.checkpoint_policies.dots_saveable
    # as the sequential model here: some losses and outputs of layers are of all examples together
    return jpipe.Pipeline(case.layers, case.loss_fn, mesh=mesh, loss_over="microbatch", **options)


def check(seed: int) -> int:
    """Compares the case of a seed with plain Flax; the number of leaves that were compared.

    Raises:
      AssertionError: something differs; the case is described.
    """
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        try:
            return _check(make_case(seed, plain=True), make_case(seed), seed)
        finally:
            jax.clear_caches()


def _check(plain: Case, case: Case, seed: int) -> int:
    """Compares a case with the one whose layers know no mesh."""
    alive("reference")
    with nnx.use_eager_sharding(False):  # there is no mesh
        m = plain.options["num_microbatches"]
        items = sequential.random_items(plain.layers, take_microbatch(plain.batch, 0, m), seed)
        items = sequential.own_items(plain.layers, items)
        common = (plain.layers, items, plain.loss_fn, plain.batch)
        loss, grads, states = sequential.truth(*common, key=jax.random.key(KEY), m=m, rate=RATE)
        outputs, evaluation = sequential.evaluation_by_microbatch(*common, m)
    mesh, count = case.make_mesh(), 0

    def compare(what: str, found: Any, expected: Any) -> None:
        nonlocal count
        about = f"the program for {devices_of(str(case)).upper()}s; {case}; {what}"
        assert_close(found, expected, about, TOLERANCES)
        count += len(jax.tree.leaves(expected))

    with programs_of(str(case)), jax.set_mesh(mesh) if case.set_mesh else contextlib.nullcontext():
        pipe = make_pipe(case, mesh)
        alive("from_layer_variables")
        variables = pipe.from_layer_variables(items, case.batch)
        alive("value_and_grad")
        (found, updates), gradients = pipe.value_and_grad(variables, case.batch, jax.random.key(KEY))
        compare("loss", found, loss)
        alive("layer_variables")
        trees = jax.device_get(pipe.layer_variables({"params": gradients, **updates}))
        of_layers = [sequential.parts_of_item(*pair) for pair in zip(case.layers, trees, strict=True)]
        compare("gradients", [p for p, _ in of_layers], sequential.own_items(case.layers, grads))
        for i, ((_, got), state) in enumerate(zip(of_layers, states, strict=True)):
            compare(f"state of layer {i}", got, sequential.typed_like(state, items[i]))
        alive("apply")
        compare("outputs", pipe.apply(variables, case.batch), outputs)
        alive("evaluate")
        compare("evaluation", pipe.evaluate(variables, case.batch), evaluation)
    return count


def describe(seed: int) -> str:
    """A case in words."""
    with jax.enable_x64(True):
        return f"seed {seed}: {make_case(seed)}"
