"""An error that proposes code is a promise: here each is provoked, what it proposes is done, and the thing goes on."""

import functools
import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec

import jpipe
from cases import assert_equal
from jpipe.memory.batches import data_shard
from small_pipeline import dense, loss_fn, make

BATCH = {
    "inputs": np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4),
    "targets": np.linspace(1, 2, 32, dtype=np.float32).reshape(8, 4),
}
TX, ADAM = optax.sgd(0.1), optax.adam(0.1)
KEY_OF = jax.random.key


def traced(pipe, batch=BATCH, key=None):
    """Shapes of what a training step gives: everything is checked and traced, and nothing compiled."""
    jax.eval_shape(lambda: pipe.value_and_grad(pipe.init(KEY_OF(0), batch), batch, key))


def planned(pipe, batch=BATCH):
    """A training step as plain data: layers are traced and partitioned."""
    pipe.planner.training_step(pipe.planner.for_training(batch))


@functools.cache
def trained():
    """A pipeline of two stages, its variables, and the layers' own."""
    pipe = make()
    variables = pipe.init(KEY_OF(0), BATCH)
    return pipe, variables, jax.device_get(pipe.layer_variables(variables))


def of_trees(pipe, trees=None):
    pipe.evaluate(pipe.from_layer_variables(trees or trained()[2], BATCH), BATCH)


def of_another(brought):
    """Variables of `trained()` in a pipeline of other cuts, as they are or brought over."""
    (first, variables, _), pipe = trained(), make(balance=[1, 3])
    pipe.planner.plan_for(BATCH)
    pipe.evaluate(pipe.from_layer_variables(first.layer_variables(variables), BATCH) if brought else variables, BATCH)


class Drops(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic):
        return nn.Dropout(0.5)(x, deterministic=deterministic)


RAW = jax.random.key_data(KEY_OF(0, impl="rbg"))
initialised = lambda key: jax.eval_shape(make().init, key, BATCH)


def looked_at(call, *seen, **options):
    """Calls it with a pipeline that has seen some batches, or none."""
    pipe = make(balance="flops", **options)
    for batch in seen:
        jax.eval_shape(pipe.init, KEY_OF(0), batch)
    call(pipe)


FIRST = "call pipe.init(key, batch) first"
OF_VARIABLES = [
    (
        lambda: make(num_stages=1).evaluate(trained()[2], BATCH),
        "lay out trees of layers by pipe.from_layer_variables(trees, batch)",
        lambda: of_trees(make(num_stages=1)),
    ),
    (
        lambda: of_another(False),
        "translate them: pipe.from_layer_variables(other.layer_variables(variables), batch)",
        lambda: of_another(True),
    ),
    (
        lambda: traced(make([dense(), Drops()])),
        "pass key=jax.random.key(...)",
        lambda: traced(make([dense(), Drops()]), key=KEY_OF(1)),
    ),
    (
        lambda: initialised(RAW),
        "pass a typed one: jax.random.wrap_key_data(key, impl='rbg')",
        lambda: initialised(jax.random.wrap_key_data(RAW, impl="rbg")),
    ),
    (lambda: looked_at(lambda pipe: pipe.partition), FIRST, lambda: looked_at(lambda pipe: pipe.partition, BATCH)),
    (lambda: make().from_layer_variables(trained()[2]), f"{FIRST}, or pass a batch", lambda: of_trees(make())),
    (lambda: looked_at(lambda p: p.view()), f"{FIRST}, or pass a batch", lambda: looked_at(lambda p: p.view(), BATCH)),
    (
        lambda: make(None, None).evaluate(make(None, None).init(KEY_OF(0), BATCH), BATCH),
        "make one with a loss: jpipe.Pipeline(layers, loss_fn, ...)",
        lambda: of_trees(make(None, loss_fn), trained()[0].layer_variables(trained()[1])),
    ),
]

image = {"image": BATCH["inputs"], "targets": BATCH["targets"]}
scaled = lambda x, temperature: x / temperature[:, None]
heated = lambda: make([dense(), jpipe.reads(scaled, lambda batch: batch["temperature"])])
EXAMPLES = [np.full(4, i, np.float32) for i in range(8)]
summed = lambda: make([dense(), dense()], lambda y, _: jnp.mean(y**2))
doubled = functools.partial(make, None, lambda y, b: jnp.mean(y), inputs=lambda batch: 2 * batch)


def applied(**options):
    pipe = doubled()
    pipe.apply(pipe.init(KEY_OF(0), BATCH["inputs"]), BATCH["inputs"], **options)


def cut(counts, rows=6):
    for count in counts:
        make(num_microbatches=count).planner.for_training({name: np.ones((rows, 4), np.float32) for name in BATCH})


ONE_FOR_ALL = "repeat it for each example, np.full(batch_size, value), or leave it out of the batch"
OF_BATCHES = [
    (
        lambda: traced(make(), image),
        "name what the first layer takes 'inputs', or pass inputs=lambda batch: ...",
        lambda: traced(make(inputs=lambda batch: batch["image"]), image),
    ),
    *(
        (
            lambda number=number: traced(heated(), BATCH | {"temperature": number}),
            ONE_FOR_ALL,
            lambda: traced(heated(), BATCH | {"temperature": np.full(8, np.float32(2))}),
        )
        for number in (2.0, np.float32(2), np.array(2), True)
    ),
    *(
        (
            lambda targets=targets: traced(summed(), {"inputs": EXAMPLES, "targets": targets}),
            words,
            lambda: traced(summed(), BATCH | {"inputs": np.stack(EXAMPLES)}),
        )
        for targets, words in (
            (BATCH["targets"], "pass np.stack(batch['inputs'])"),
            ([1.0] * 8, "pass np.stack(batch['inputs'])"),  # was a remedy that is for numbers
            (None, "pass np.stack(examples)"),
            (EXAMPLES, "pass np.stack(examples)"),
        )
    ),
    (lambda: cut([4]), "is not divisible by num_microbatches=4; use 1, 2, 3 or 6", lambda: cut([1, 2, 3, 6])),
    (applied, "say which: pipe.apply(variables, batch, bare=False)", lambda: (applied(bare=False), applied(bare=True))),
]


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


class Masked(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        return nn.Dense(4)(x) * mask


class Memory(nn.Module):
    """Adds what it saw in the step before, which it keeps."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        last = self.variable("memory", "last", lambda: jnp.zeros(x.shape, x.dtype))
        y = x + jnp.tanh(last.value)
        if train and not self.is_initializing():
            last.value = x
        return y


def factories(*others):
    traced(make([dense(), *others]))


take = lambda tree: tree["x"]
masked_batch = BATCH | {"mask": np.ones((8, 1), np.float32)}
scale_layer = jpipe.Layer(lambda key, x: jnp.ones((), x.dtype), lambda params, x: params * x)
remembers = lambda x, last: (x + jnp.tanh(last), x)
with_memory = {"inputs": lambda b: (b["inputs"], b["memory"]), "loss": lambda y, b: loss_fn(y[0], b)}
count = lambda y, b: jnp.mean((y > b["targets"]).astype(jnp.float32))
OF_LAYERS = [
    (
        lambda: make([dense(), 3]),
        "layers[1] is a int; use a module, function or jpipe.Layer(init, apply)",
        lambda: factories(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), lambda rngs: Block(4, rngs), scale_layer, jnp.tanh),
    ),
    (lambda: make([dense(), nn.Dense]), "call it, as in Dense(...)", lambda: factories(nn.Dense(4))),
    (
        lambda: traced(make([dense(), Masked()]), masked_batch),
        'what the batch holds is read by jpipe.reads(layer, lambda batch: batch["mask"])',
        lambda: traced(make([dense(), jpipe.reads(Masked(), lambda batch: batch["mask"])]), masked_batch),
    ),
    (
        lambda: factories(lambda x: {"x": x, "key": KEY_OF(0)}, take),
        "gives key<fry> at ['key']; give plain arrays, such as jax.random.key_data(key)",
        lambda: factories(lambda x: {"x": x, "key": jax.random.key_data(KEY_OF(0))}, take),
    ),
    (
        # It was taken for (loss_sum, weight_sum), and came out as infinite with a warning.
        lambda: make(loss=lambda y, b: (loss_fn(y, b), count(y, b))).planner.plan_for(BATCH),
        "return the loss alone, or (loss, 1.0, {'accuracy': accuracy})",
        lambda: traced(make(loss=lambda y, b: (loss_fn(y, b), 1.0, {"accuracy": count(y, b)}))),
    ),
    (
        lambda: traced(make([Memory(), dense()])),
        "pass it in the batch, or use num_microbatches=1",
        lambda: (
            traced(make([Memory(), dense()], num_microbatches=1)),
            traced(
                make([remembers, lambda y, new: (jnp.sin(y), new)], **with_memory),
                BATCH | {"memory": np.zeros((8, 4), np.float32)},
            ),
        ),
    ),
]


# --- connections, shared and frozen layers ----------------------------------------------------------------------------

stash, pop, reads, Shared = jpipe.stash, jpipe.pop, jpipe.reads, jpipe.Shared
first, second = lambda batch: batch["inputs"], lambda batch: batch["targets"]
same = lambda x: x
hands_on, sums = pop(lambda x, kept: (x, kept), "b"), pop(lambda x, kept: x[0] + x[1] + kept, "a")
linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
tied, tied_linear = Shared(dense()), Shared(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
of_stash = Shared(stash(dense(), "a"))
where = lambda path: path == "kernel"
CONNECTED = [
    (
        lambda: stash(stash(dense(), "a"), "b"),
        "put an identity layer behind it, jpipe.stash(lambda x: x, 'b')",
        lambda: traced(make([stash(dense(), "a"), stash(same, "b"), pop(jnp.add, "b"), pop(jnp.add, "a")])),
    ),
    (  # it proposed jpipe.pop(lambda x: x, ...), which is called with (x, kept): a TypeError
        lambda: pop(pop(jnp.add, "a"), "b"),
        "put a layer before it that hands both on, jpipe.pop(lambda x, kept: (x, kept), 'b')",
        lambda: traced(make([stash(dense(), "a"), stash(same, "b"), hands_on, sums])),
    ),
    (
        lambda: reads(reads(dense(), first), second),
        "jpipe.reads(layer, lambda batch: (first(batch), second(batch)))",
        lambda: factories(reads(lambda x, side: x + side[0] * side[1], lambda batch: (first(batch), second(batch)))),
    ),
    (
        lambda: make([stash(dense(), "a"), jnp.tanh, pop(jnp.add, "a"), pop(jnp.multiply, "a")]),
        "pop a second skip, which an identity behind layer 0 stashes: jpipe.stash(lambda x: x, 'another name')",
        lambda: traced(make([stash(dense(), "a"), stash(same, "c"), pop(jnp.add, "a"), pop(jnp.multiply, "c")])),
    ),
    (
        lambda: make([linear, jnp.tanh, linear]),
        'put tied = jpipe.Shared(Linear(...)) in both places, or tied.using("a_method")',
        lambda: traced(make([tied_linear, jnp.tanh, tied_linear])),
    ),
    (
        lambda: make([of_stash, of_stash, pop(jnp.add, "a")]),
        "mark its use: jpipe.stash(jpipe.Shared(layer), 'a')",
        lambda: traced(make([stash(tied, "a"), tied, pop(jnp.add, "a")])),
    ),
    (
        lambda: jpipe.freeze([dense(), dense()], where),
        "freeze each: [jpipe.freeze(layer, where) for layer in layers]",
        lambda: traced(make([jpipe.freeze(layer, where) for layer in (dense(), dense())])),
    ),
]

# --- meshes, schedules, plans -----------------------------------------------------------------------------------------

schedule = functools.partial(jpipe.make_schedule, num_stages=2, num_microbatches=4)
Schedule = jpipe.Schedule
words = {"inputs": np.zeros((8, 2), np.int32), "targets": np.zeros((8, 2), np.int32)}
of_words = lambda y, b: optax.softmax_cross_entropy_with_integer_labels(y, b["targets"]).mean()
data_mesh = functools.partial(jpipe.make_mesh, stage=2, data=2)


def chunked(name, chunks, microbatches=3):
    jpipe.make_schedule(name, num_stages=2, num_microbatches=microbatches, num_chunks=chunks)


def with_ends(vocabulary=512, width=128, ends="shared", **options):
    layers = [nn.Embed(vocabulary, width), dense(width), dense(width), dense(width), nn.Dense(vocabulary)]
    planned(make(layers, of_words, ends=ends, **options), words)


ROUND = {"num_chunks": 2, "schedule": "zero_bubble"}
OF_SCHEDULES = [
    (data_mesh, "resize, or pass devices=jax.devices()[:n]", lambda: data_mesh(devices=jax.devices()[:4])),
    (
        lambda: make(mesh=2),
        "pass a Mesh, as jax.make_mesh((2,), ('stage',))",
        lambda: traced(make(mesh=jax.make_mesh((2,), ("stage",)))),
    ),
    (
        lambda: Schedule.from_csv(Path("a.csv")),
        "pass Path(...).read_text()",
        lambda: Schedule.from_csv(schedule("1f1b").to_csv(), slots=("F", "B")),
    ),
    (
        lambda: jpipe.zero_bubble(schedule("forward")),
        "pass one that has, as jpipe.make_schedule('1f1b', ...)",
        lambda: jpipe.zero_bubble(schedule("1f1b")),
    ),
    *(
        (
            lambda name=name, chunks=chunks: chunked(name, chunks),
            f"use schedule='interleaved' or num_chunks={good}",
            lambda name=name, chunks=chunks, good=good: (chunked("interleaved", chunks), chunked(name, good)),
        )
        for name, chunks, good in (("1f1b", 2, 1), ("gpipe", 3, 1), ("naive", 2, 1), ("v", 1, 2), ("v", 4, 2))
    ),
    (
        lambda: make(schedule="zero_bubble", remat="stage"),
        'use remat="none"',
        lambda: (make(schedule="zero_bubble", remat="none"), make(schedule="1f1b", remat="stage")),
    ),
    (
        lambda: with_ends(schedule="gpipe"),
        "use schedule='1f1b', or ends='spread'",
        lambda: (with_ends(), with_ends(schedule="gpipe", ends="spread")),
    ),
    (  # the remedy was the schedule that is refused here
        lambda: with_ends(num_microbatches=5, **ROUND | {"schedule": "interleaved"}),
        "schedule='interleaved' and a num_microbatches that 2 divides, or ends='spread'",
        lambda: (with_ends(num_microbatches=8, **ROUND), with_ends(num_microbatches=8, ends="spread", **ROUND)),
    ),
    *(
        (
            lambda: Schedule([[0, "B0"]]),
            'use Action("F", 0), ("F", 0), ("F", 0, 1), "F0" or "F0.1"',
            lambda actions=actions: Schedule([actions]),
        )
        for actions in (
            [jpipe.Action("F", 0), "B0"],
            [("F", 0), ("F", 0, 1), "B0.1", "B0"],
            ["F0", "F0.1", "B0.1", "B0"],
        )
    ),
    (lambda: Schedule([["F0", "B0"]], slots=()), 'as ("F", "B")', lambda: Schedule([["F0", "B0"]], slots=("F", "B"))),
    (
        lambda: with_ends(513, 129),
        "pad the vocabulary to a multiple of K, or use ends='spread'",
        lambda: (with_ends(514, 129), with_ends(513, 129, "spread")),
    ),
    (lambda: Schedule([[]]), 'give each stage some, as ["F0"]', lambda: Schedule([["F0"]])),
]

# --- optimisers -------------------------------------------------------------------------------------------------------

by_shape = lambda params: jax.tree.map(lambda a: a.ndim > 1, params)
by_name = lambda params: unflatten_dict({path: path[-1] != "bias" for path in flatten_dict(params)})
labels = lambda params: jax.tree_util.tree_map_with_path(lambda path, _: str(path[-1].key == "bias"), params)
of_labels = optax.multi_transform({"True": optax.sgd(0.1), "False": optax.adam(0.1)}, labels)
noise = optax.add_noise(0.1, 0.5, key=0)
state_of = lambda tx: make().abstract_state(BATCH, tx)
WRAPPED = (
    "wrap that part of it in jpipe.per_layer(...), as in optax.chain(optax.clip_by_global_norm(1.0), "
    "jpipe.per_layer(optax.lamb(1e-3)))"
)
NO_TX = "pass an optax transformation, such as optax.adamw(1e-3) (of an optax.MultiSteps its gradient_transformation())"
OF_OPTIMISERS = [
    (lambda: state_of(optax.adamw), NO_TX, lambda: state_of(optax.adamw(1e-3))),
    (
        lambda: state_of(optax.MultiSteps(TX, 2)),
        NO_TX,
        lambda: state_of(optax.MultiSteps(TX, 2).gradient_transformation()),
    ),
    *(
        (
            lambda tx=tx: state_of(tx),
            WRAPPED,
            lambda tx=tx: state_of(optax.chain(optax.clip_by_global_norm(1.0), jpipe.per_layer(tx))),
        )
        for tx in (optax.adamw(1e-3, mask=by_shape), optax.adamw(1e-3, mask=by_name), optax.lamb(1e-3))
    ),
    *(  # in a loop of one's own, where no `create_state` sees it
        (
            lambda tx=tx: tx.init(trained()[1]["params"]),
            WRAPPED,
            lambda tx=tx: jpipe.per_layer(tx).init(trained()[1]["params"]),
        )
        for tx in (optax.adamw(1e-3, mask=by_shape), of_labels)
    ),
    (
        lambda: make().create_state(KEY_OF(0), BATCH, jpipe.per_layer(optax.chain(noise, TX))),
        "keep it outside, as in optax.chain(optax.add_noise(...), jpipe.per_layer(...))",
        lambda: state_of(optax.chain(noise, jpipe.per_layer(TX))),
    ),
]


@pytest.mark.parametrize(
    ("wrong", "proposal", "as_proposed"),
    [*OF_VARIABLES, *OF_BATCHES, *OF_LAYERS, *CONNECTED, *OF_SCHEDULES, *OF_OPTIMISERS],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_an_error_proposes_goes(wrong, proposal, as_proposed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        with pytest.raises((TypeError, ValueError), match=re.escape(proposal)):
            wrong()
        as_proposed()


class Chain(nn.Module):
    """A model that is one module, of some depth and width."""

    depth: int = 4
    width: int = 4

    @nn.compact
    def __call__(self, x):
        for _ in range(self.depth):
            x = nn.Dense(self.width)(x)
        return nn.Dense(4)(x)


def begun(new, saved):
    """The new values, replaced by those saved that fit."""
    if isinstance(new, dict):
        return {name: begun(value, saved[name]) if name in saved else value for name, value in new.items()}
    return saved.astype(new.dtype) if new.shape == saved.shape else new


@pytest.mark.parametrize(
    "change", [{"depth": 6}, pytest.param({"depth": 3}, marks=pytest.mark.slow), {"width": 8}], ids=str
)
def test_checkpoints_of_other_models(change, tmp_path):
    """The remedy gave another error, or none at all, where depth or width are others: not all values fit."""
    first, other = make(Chain(), balance="flops"), make(Chain(**change), balance="flops")
    proposal = re.escape(
        "put what fits of jpipe.load_model(directory), cast, into trees = pipe.model_variables(pipe.init(key, batch)), "
        "and call pipe.create_state(..., variables=pipe.from_model_variables(trees, batch))"
    )
    with jpipe.Checkpointer(tmp_path) as saved:
        saved.save(first, first.create_state(KEY_OF(0), BATCH, TX))
        with pytest.raises(ValueError, match=proposal):
            saved.restore(other, BATCH, TX)
    tree = begun(other.model_variables(other.init(KEY_OF(0), BATCH)), jpipe.load_model(tmp_path))
    state = other.create_state(KEY_OF(0), BATCH, TX, variables=other.from_model_variables(tree, BATCH))
    assert jnp.isfinite(other.train_step(state, BATCH)[1]["loss"])


def test_a_checkpoint_of_a_list_for_another_optimiser(tmp_path):
    pipe, variables, trees = trained()
    with jpipe.Checkpointer(tmp_path) as saved:
        saved.save(pipe, pipe.create_state(KEY_OF(0), BATCH, TX, variables=variables))
        with pytest.raises(ValueError, match=r"what fits of jpipe\.load_layers.*=pipe\.from_layer_variables\(trees"):
            saved.restore(pipe, BATCH, ADAM)
    brought = pipe.from_layer_variables(jpipe.load_layers(tmp_path), BATCH)
    begun = pipe.create_state(KEY_OF(0), BATCH, ADAM, variables=brought)
    assert_equal(jax.device_get(pipe.layer_variables(begun.variables)), trees)


def test_rows_of_processes(monkeypatch):
    """Of devices whose processes are imagined: those of the first four are 0, of the others 1."""

    class Device:
        slice_index, platform, device_kind = None, "gpu", "imagined"

        def __init__(self, number):
            self.id, self.process_index = number, number // 4

    class Imagined:
        def __init__(self, devices, axis_names, axis_types=None):
            self.devices, self.axis_names, self.size = devices, axis_names, devices.size
            self.shape = dict(zip(axis_names, devices.shape, strict=True))

    monkeypatch.setattr("jpipe.partitioner.users_mesh.Mesh", Imagined)
    devices, names = np.array([Device(number) for number in range(8)]), ("stage", "data")
    apart = devices[[0, 4, 1, 5, 2, 3, 6, 7]].reshape(2, 4)
    for own, proposal in (
        (devices[4:].reshape(2, 2), r"use all devices: jpipe\.make_mesh\(\.\.\.\)"),
        (apart, r"order devices as jpipe\.make_mesh\(stage=\.\.\., data=\.\.\.\) does"),
    ):
        with pytest.raises(ValueError, match=proposal):
            data_shard(Imagined(own, names), ("data",))
    for sizes, shard in (((1, 8), (0, 2)), ((2, 4), (0, 1)), ((8, 1), (0, 1))):
        mesh = jpipe.make_mesh(stage=sizes[0], data=sizes[1], devices=list(devices))
        assert data_shard(mesh, ("data",)) == shard


def test_nothing_is_split_over_an_axis(make_mesh):
    mesh = make_mesh((2, 2), ("stage", "model"))
    split = nn.Dense(4, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "model")))
    constrained = lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec(None, "model"))
    proposal = r"Name it in batch_axes= or layers' metadata \(nn\.with_partitioning, nn\.logical_axis_rules\)"
    with pytest.warns(UserWarning, match=proposal):
        make(mesh=mesh).planner.plan_for(BATCH)
    ways = ([dense(), dense()], {"batch_axes": "model"}), ([split, dense()], {}), ([dense(), constrained], {})
    for layers, options in ways:
        make(layers, mesh=mesh, **options).planner.plan_for(BATCH)  # a warning would be an error
