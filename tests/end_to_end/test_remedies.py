"""An error that proposes code is a promise: here each is provoked, what it proposes is done, and the thing goes on.

The last test reads all texts of the package, and asks for those that propose code and stand in none of these tests.
"""

import ast
import copy
import re
from collections.abc import Callable
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import io_callback
from jax.sharding import PartitionSpec

import jpipe
from cases import assert_close, assert_equal
from jpipe.memory.batches import data_shard
from jpipe.tools.chips import parse_topology
from small_pipeline import dense, loss_fn, make

FOLLOWED: set[str] = set()
BATCH = {
    "inputs": np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4),
    "targets": np.linspace(1, 2, 32, dtype=np.float32).reshape(8, 4),
}
TX = optax.sgd(0.1)


def follows(*proposals: str) -> Callable:
    """Notes that a test does what errors propose with these words, as they stand in the package."""
    FOLLOWED.update(proposals)
    return lambda test: test


def refused(error: type[Exception], proposal: str) -> object:
    """The context in which an error proposes this."""
    return pytest.raises(error, match=re.escape(proposal))


def traced(pipe, batch=BATCH, key=None):
    """Shapes of what a training step gives: everything is checked and traced, and nothing compiled."""
    start = jax.random.key(0)
    return jax.eval_shape(lambda: pipe.value_and_grad(pipe.init(start, batch), batch, key))


def planned(pipe, batch=BATCH):
    """A training step as plain data: layers are traced and partitioned."""
    return pipe.planner.training_step(pipe.planner.for_training(batch))


@pytest.fixture(scope="module")
def key():
    return jax.random.key(0)


@pytest.fixture(scope="module")
def pipe():
    return make()


@pytest.fixture(scope="module")
def state(pipe, key):
    return pipe.create_state(key, BATCH, TX)


@pytest.fixture(scope="module")
def trees(pipe, state):
    """The layers' own variables."""
    return jax.device_get(pipe.layer_variables(state.variables))


def plain_loss(trees, batch=BATCH):
    """Of the layers of `make()`, by Flax alone."""
    x = batch["inputs"]
    for tree in trees:
        x = dense().apply(tree, x)
    return loss_fn(x, batch)


# --- variables and states ---------------------------------------------------------------------------------------------


LAID_OUT = "use pipe.from_model_variables(tree, batch), of a list pipe.from_layer_variables(trees, batch)"


@follows("lay out trees of layers by pipe.from_layer_variables(trees, batch)")
@follows(LAID_OUT)
def test_trees_in_place_of_variables(pipe, trees):
    other = make(num_stages=1)
    with refused(TypeError, "lay out trees of layers by pipe.from_layer_variables(trees, batch)"):
        other.evaluate(trees, BATCH)
    with refused(TypeError, LAID_OUT):
        other.evaluate({"params": trees}, BATCH)
    variables = other.from_layer_variables(trees, BATCH)
    assert_close(other.evaluate(variables, BATCH), plain_loss(trees))


@follows("pipe.from_{}_variables(other.{}_variables(variables), batch)")
def test_variables_of_another_pipeline(state, trees):
    other, pipe = make(), make(balance=[1, 3])
    variables = other.from_layer_variables(trees, BATCH)
    pipe.planner.plan_for(BATCH)
    proposal = "translate them: pipe.from_layer_variables(other.layer_variables(variables), batch)"
    with refused(ValueError, proposal):
        pipe.evaluate(variables, BATCH)
    translated = pipe.from_layer_variables(other.layer_variables(variables), BATCH)
    assert_equal(jax.device_get(pipe.layer_variables(translated)), trees)


@follows("make it with pipe.create_state(key, batch, tx)")
@follows("keep a copy before a step: jax.tree.map(jnp.copy, state.variables)")
def test_states(pipe, key):
    with refused(TypeError, "make it with pipe.create_state(key, batch, tx)"):
        pipe.train_step({"params": 1}, BATCH)
    state = pipe.create_state(key, BATCH, TX)
    kept = jax.tree.map(jnp.copy, state.variables)
    new, _ = pipe.train_step(state, BATCH)
    for call in (lambda: pipe.train_step(state, BATCH), lambda: pipe.evaluate(state.variables, BATCH)):
        with refused(ValueError, "keep a copy before a step: jax.tree.map(jnp.copy, state.variables)"):
            call()
    assert_close(pipe.evaluate(kept, BATCH), plain_loss(jax.device_get(pipe.layer_variables(kept))))
    assert int(new.step) == 1


@follows("pass key=jax.random.key(...)")
def test_a_key_for_layers_that_draw(key):
    class Drops(nn.Module):
        @nn.compact
        def __call__(self, x, deterministic):
            return nn.Dropout(0.5)(x, deterministic=deterministic)

    pipe = make([dense(), Drops()])
    with refused(ValueError, "pass key=jax.random.key(...)"):
        traced(pipe)
    assert traced(pipe, key=jax.random.key(1))[0][0].shape == ()


@follows("use jax.random.key(0)")
@follows("pass a typed one: jax.random.wrap_key_data(key, impl='rbg')")
def test_keys(pipe):
    initialise = lambda key: jax.eval_shape(pipe.init, key, BATCH)
    with refused(TypeError, "use jax.random.key(0)"):
        pipe.init(0, BATCH)
    initialise(jax.random.key(0))
    raw = jax.random.key_data(jax.random.key(0, impl="rbg"))
    with refused(TypeError, "pass a typed one: jax.random.wrap_key_data(key, impl='rbg')"):
        pipe.init(raw, BATCH)
    initialise(jax.random.key(0, impl="rbg"))
    initialise(jax.random.wrap_key_data(raw, impl="rbg"))


@follows("call pipe.init(key, batch) first")
def test_pipelines_that_have_seen_no_batch(key, state, trees):
    pipe = make(balance="flops")
    with refused(ValueError, "call pipe.init(key, batch) first"):
        _ = pipe.partition
    jax.eval_shape(pipe.init, key, BATCH)
    assert pipe.partition.counts == (2, 2)
    pipe = make()
    with refused(ValueError, "call pipe.init(key, batch) first, or pass a batch"):
        pipe.from_layer_variables(trees)
    assert_close(pipe.evaluate(pipe.from_layer_variables(trees, BATCH), BATCH), plain_loss(trees))
    pipe = make()
    with refused(ValueError, "call pipe.init(key, batch) first, or pass a batch"):
        pipe.layer_variables(state.variables)
    jax.eval_shape(pipe.init, key, BATCH)
    assert_equal(jax.device_get(pipe.layer_variables(state.variables)), trees)


@follows("pipelines can't be differentiated; use grads of pipe.value_and_grad(variables, batch, key)")
def test_differentiation_from_outside(pipe, state, trees):
    forward = (lambda v: pipe.evaluate(v, BATCH), lambda v: jnp.sum(pipe.apply(v, BATCH)))
    for call in (*forward, lambda v: pipe.value_and_grad(v, BATCH)[0][0]):
        with refused(TypeError, "use grads of pipe.value_and_grad(variables, batch, key)"):
            jax.grad(call)(state.variables)
    (loss, _), grads = pipe.value_and_grad(state.variables, BATCH, jax.random.key(0))
    expected, gradients = jax.jit(jax.value_and_grad(plain_loss))(trees)
    assert_close(loss, expected)
    assert_close(pipe.layer_variables({"params": grads}), gradients)


SAVED = (
    "save tree = jax.device_get(pipe.model_variables(variables)), and load it by pipe.from_model_variables(tree, "
    "batch), of a list by layer_variables and from_layer_variables; or save a state by "
    "jpipe.Checkpointer(directory).save(pipe, state)"
)
BEGUN = (
    "put what fits of jpipe.{load}(directory), cast, into trees = pipe.{kind}_variables(pipe.init(key, batch)), and "
    "call pipe.create_state(..., variables=pipe.from_{kind}_variables(trees, batch))"
)
OF_LAYERS = BEGUN.format(kind="layer", load="load_layers")


BUFFERS = "{} follows the pipeline's buffers, not its layers; wrap what keeps it in jpipe.per_layer(...)"


@follows(
    SAVED,
    re.sub(r"{\w+}", "{}", BEGUN),
    BUFFERS,
)
def test_saving(pipe, state, trees, key, tmp_path):
    with refused(TypeError, SAVED):
        copy._reconstruct(state.variables["params"], None, *state.variables["params"].__reduce__())
    assert_equal(pipe.from_layer_variables(trees, BATCH), state.variables)
    with jpipe.Checkpointer(tmp_path) as saved:
        saved.save(pipe, state)
    assert_equal(jpipe.load_layers(tmp_path), trees)
    with jpipe.Checkpointer(tmp_path) as saved, refused(ValueError, OF_LAYERS):
        saved.restore(pipe, BATCH, optax.adam(0.1))
    begun = pipe.layer_variables(pipe.init(key, BATCH))
    begun[:] = jpipe.load_layers(tmp_path)
    begun = pipe.create_state(key, BATCH, optax.adam(0.1), variables=pipe.from_layer_variables(begun, BATCH))
    assert_equal(jax.device_get(pipe.layer_variables(begun.variables)), trees)
    copies = optax.GradientTransformation(
        lambda params: list(jax.tree.map(jnp.copy, jax.tree.leaves(params))),
        lambda grads, state, params=None: (jax.tree.map(lambda g: -0.1 * g, grads), state),
    )
    with jpipe.Checkpointer(tmp_path / "copies") as saved:
        with refused(TypeError, BUFFERS.rpartition("; ")[2]):
            saved.save(pipe, pipe.create_state(key, BATCH, copies))
        saved.save(pipe, pipe.create_state(key, BATCH, jpipe.per_layer(copies)))
    assert_equal(jpipe.load_layers(tmp_path / "copies"), trees)


class Chain(nn.Module):
    """A model that is one module, of some depth, width and dtype."""

    depth: int = 4
    width: int = 4
    dtype: type = jnp.float32

    @nn.compact
    def __call__(self, x):
        for _ in range(self.depth):
            x = nn.Dense(self.width, param_dtype=self.dtype, dtype=jnp.float32)(x)
        return nn.Dense(4, param_dtype=self.dtype, dtype=jnp.float32)(x)


@pytest.mark.parametrize("change", [{"depth": 6}, {"depth": 3}, {"width": 8}, {"dtype": jnp.bfloat16}], ids=str)
def test_checkpoints_of_other_models(change, key, tmp_path):
    """The remedy gave another error, or none at all, where depth, width or dtype are others: not all values fit."""

    def begun(new, saved):
        """The new values, replaced by those saved that fit."""
        if isinstance(new, dict):
            return {name: begun(value, saved[name]) if name in saved else value for name, value in new.items()}
        return saved.astype(new.dtype) if new.shape == saved.shape else new

    for whole in (True, False):
        sizes, directory = {"depth": 4, "width": 4, "dtype": jnp.float32} | change, tmp_path / str(whole)
        blocks = lambda depth=4, width=4, dtype=jnp.float32: [
            nn.Dense(features, param_dtype=dtype, dtype=jnp.float32) for features in (*[width] * depth, 4)
        ]
        first, other = (make(Chain(**k) if whole else blocks(**k), balance="flops") for k in ({}, sizes))
        with jpipe.Checkpointer(directory) as saved:
            saved.save(first, first.create_state(key, BATCH, TX))
        words = {"kind": "model", "load": "load_model"} if whole else {}
        with jpipe.Checkpointer(directory) as saved, refused(ValueError, BEGUN.format(**words) if whole else OF_LAYERS):
            saved.restore(other, BATCH, TX)
        if whole:
            tree = begun(other.model_variables(other.init(key, BATCH)), jpipe.load_model(directory))
            variables = other.from_model_variables(tree, BATCH)
        else:
            trees, read = other.layer_variables(other.init(key, BATCH)), jpipe.load_layers(directory)
            trees = [begun(trees[i], read[i]) if i < len(read) else trees[i] for i in range(len(trees))]
            variables = other.from_layer_variables(trees, BATCH)
        state = other.create_state(key, BATCH, TX, variables=variables)
        assert jnp.isfinite(other.train_step(state, BATCH)[1]["loss"])


# --- batches ----------------------------------------------------------------------------------------------------------


@follows("name what the first layer takes 'inputs', or pass inputs=lambda batch: ... to jpipe.Pipeline")
@follows("pass inputs=lambda batch: batch.... to jpipe.Pipeline")
def test_what_the_first_layer_takes(pipe):
    image = {"image": BATCH["inputs"], "targets": BATCH["targets"]}
    with refused(ValueError, "or pass inputs=lambda batch: ... to jpipe.Pipeline"):
        traced(make(), image)
    traced(make(inputs=lambda batch: batch["image"]), image)

    @jax.tree_util.register_pytree_node_class
    class Rows:
        def __init__(self, inputs, targets):
            self.inputs, self.targets = inputs, targets

        def tree_flatten(self):
            return (self.inputs, self.targets), None

        @classmethod
        def tree_unflatten(cls, _, leaves):
            return cls(*leaves)

    loss = lambda y, batch: loss_fn(y, {"targets": batch.targets})
    with refused(ValueError, "pass inputs=lambda batch: batch.... to jpipe.Pipeline"):
        traced(make(loss=loss), Rows(**BATCH))
    traced(make(loss=loss, inputs=lambda batch: batch.inputs), Rows(**BATCH))


@follows("pass jax.random.key_data(keys), and call jax.random.wrap_key_data on it")
def test_keys_in_a_batch(key):
    def noisy(x, data):
        return x + jax.vmap(lambda k: jax.random.normal(k, (4,)))(jax.random.wrap_key_data(data))

    keys = jax.random.split(key, 8)
    pipe = make([dense(), jpipe.reads(noisy, lambda batch: batch["keys"])])
    with refused(TypeError, "pass jax.random.key_data(keys), and call jax.random.wrap_key_data"):
        pipe.init(key, BATCH | {"keys": keys})
    batch = BATCH | {"keys": jax.random.key_data(keys)}
    variables = pipe.init(key, batch)
    trees = jax.device_get(pipe.layer_variables(variables))
    noise = jax.vmap(lambda k: jax.random.normal(k, (4,)))(keys)
    assert_close(pipe.apply(variables, batch), dense().apply(trees[0], BATCH["inputs"]) + noise)


@follows("repeat it for each example, np.full(batch_size, value), or leave it out of the batch")
def test_a_number_for_all_examples(key):
    proposal = "repeat it for each example, np.full(batch_size, value), or leave it out of the batch"

    def scaled(x, temperature):
        return x / temperature[:, None]

    pipe = make([dense(), jpipe.reads(scaled, lambda batch: batch["temperature"])])
    for number, error in ((2.0, TypeError), (np.float32(2), ValueError), (np.array(2), ValueError), (True, TypeError)):
        with refused(error, proposal):
            pipe.init(key, BATCH | {"temperature": number})
    batch = BATCH | {"temperature": np.full(8, np.float32(2))}
    variables = pipe.init(key, batch)
    (tree, _) = jax.device_get(pipe.layer_variables(variables))
    assert_close(pipe.evaluate(variables, batch), loss_fn(dense().apply(tree, BATCH["inputs"]) / 2.0, BATCH))
    out = make([dense(), lambda x: x / 2.0])
    variables = out.from_layer_variables([tree, {}], BATCH)
    assert_close(out.evaluate(variables, BATCH), loss_fn(dense().apply(tree, BATCH["inputs"]) / 2.0, BATCH))
    with pytest.raises(TypeError, match=r"is a str, not an array; batches are pytrees of arrays \[B, \.\.\.\]$"):
        make().init(key, BATCH | {"temperature": "warm"})


class OneModule(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.Dense(4)(x))


EXAMPLES = [np.full(4, i, np.float32) for i in range(8)]


@follows(
    "{0} is a list, whose items are arrays of their own: if they are examples, pass np.stack({0})",
    "pass np.stack(examples)",
)
@pytest.mark.parametrize(
    ("targets", "error", "name"),
    [
        (BATCH["targets"], ValueError, "inputs"),
        ([1.0] * 8, TypeError, "inputs"),
        ([np.float32(1)] * 8, ValueError, "inputs"),
        (None, ValueError, None),
        (EXAMPLES, ValueError, None),
    ],
)
def test_examples_in_a_list(targets, error, name, key):
    """It was a TracerArrayConversionError of numpy's, or a remedy that is for numbers."""
    batch, loss = {"inputs": EXAMPLES, "targets": targets}, lambda y, _: jnp.mean(y**2)
    for pipe in (make(OneModule(), loss), make([dense(), dense()], loss)):
        with refused(error, f"pass np.stack(batch['{name}'])" if name else "pass np.stack(examples)"):
            pipe.init(key, batch)
    batch = {name: np.stack(rows) if isinstance(rows, list) else rows for name, rows in batch.items()}
    variables = pipe.init(key, batch)
    first, second = jax.device_get(pipe.layer_variables(variables))
    assert_close(pipe.apply(variables, batch), dense().apply(second, dense().apply(first, np.stack(EXAMPLES))))


@pytest.mark.parametrize("rows", [6, 30])
def test_batches_that_can_not_be_cut(rows):
    batch = jax.tree.map(lambda a: np.ones((rows, 4), np.float32), BATCH)
    with pytest.raises(ValueError, match="is not divisible by num_microbatches=4; use 1, 2") as info:
        make(num_microbatches=4).planner.for_training(batch)
    proposed = [int(count) for count in re.findall(r"\d+", str(info.value).rpartition("use ")[2])]
    assert proposed == [count for count in range(1, rows + 1) if rows % count == 0]
    for count in proposed:
        make(num_microbatches=count).planner.for_training(batch)


# --- layers -----------------------------------------------------------------------------------------------------------

LAYERS_OF = "use a module, function or jpipe.Layer(init, apply)"


def scale_init(key, x):
    return jnp.ones((), x.dtype)


def scale(params, x):
    return params * x


@follows(LAYERS_OF)
def test_what_is_no_layer():
    with refused(TypeError, LAYERS_OF):
        make([dense(), 3])
    linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    factory = lambda rngs: nnx.Linear(4, 4, rngs=rngs)
    traced(make([dense(), linear, factory, jpipe.Layer(scale_init, scale), jnp.tanh]))


@follows("call it, as in {}(...), or for a class of nnx pass `lambda rngs: {}(..., rngs=rngs)`")
def test_a_class_in_place_of_a_layer():
    with refused(TypeError, "call it, as in Dense(...)"):
        make([dense(), nn.Dense])
    with refused(TypeError, "or for a class of nnx pass `lambda rngs: Linear(..., rngs=rngs)`"):
        make([dense(), nnx.Linear])
    traced(make([dense(), nn.Dense(4), lambda rngs: nnx.Linear(4, 4, rngs=rngs)]))


@follows("it is called with rngs alone, which it hands on, as in lambda rngs: Block(width, rngs=rngs)")
@follows("A function that makes an nnx module takes rngs, as in lambda rngs: Block(width, rngs=rngs)")
def test_factories():
    class Block(nnx.Module):
        def __init__(self, width, rngs):
            self.linear = nnx.Linear(width, width, rngs=rngs)

        def __call__(self, x):
            return self.linear(x)

    with refused(TypeError, "which it hands on, as in lambda rngs: Block(width, rngs=rngs)"):
        make([dense(), lambda rngs: Block(4)])
    with refused(ValueError, "takes rngs, as in lambda rngs: Block(width, rngs=rngs)"):
        traced(make([dense(), lambda r: Block(4, r)]))
    traced(make([dense(), lambda rngs: Block(4, rngs=rngs)]))


@follows('what the batch holds is read by jpipe.reads(layer, lambda batch: batch["mask"])')
def test_layers_that_take_more():
    class Masked(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            return nn.Dense(4)(x) * mask

    batch = BATCH | {"mask": np.ones((8, 1), np.float32)}
    proposal = 'what the batch holds is read by jpipe.reads(layer, lambda batch: batch["mask"])'
    with refused(ValueError, proposal):
        traced(make([dense(), Masked()]), batch)
    traced(make([dense(), jpipe.reads(Masked(), lambda batch: batch["mask"])]), batch)
    traced(make([lambda x: (x, jnp.ones_like(x)), Masked()]))  # the other proposal: a tuple


@follows("give plain arrays, such as jax.random.key_data(key)")
def test_keys_at_a_boundary():
    take = lambda tree: tree["x"]
    with refused(ValueError, "such as jax.random.key_data(key)"):
        traced(make([dense(), lambda x: {"x": x, "key": jax.random.key(0)}, take]))
    traced(make([dense(), lambda x: {"x": x, "key": jax.random.key_data(jax.random.key(0))}, take]))


# --- connections and shared layers ------------------------------------------------------------------------------------


@follows("for a second name put an identity layer behind it, jpipe.stash(lambda x: x, {})")
@follows("for a second skip put a layer before it that hands both on, jpipe.pop(lambda x, kept: (x, kept), {})")
@follows("read both by one function, jpipe.reads(layer, lambda batch: (first(batch), second(batch)))")
@follows("pop a second skip, which an identity behind layer {} stashes: jpipe.stash(lambda x: x, 'another name')")
def test_connections_twice(key):
    """It proposed jpipe.pop(lambda x: x, ...), which is called with (x, kept): a TypeError."""
    with refused(ValueError, "put an identity layer behind it, jpipe.stash(lambda x: x, 'b')"):
        jpipe.stash(jpipe.stash(dense(), "a"), "b")
    with refused(ValueError, "that hands both on, jpipe.pop(lambda x, kept: (x, kept), 'b')"):
        jpipe.pop(jpipe.pop(jnp.add, "a"), "b")
    first, second = lambda batch: batch["inputs"], lambda batch: batch["targets"]
    with refused(ValueError, "jpipe.reads(layer, lambda batch: (first(batch), second(batch)))"):
        jpipe.reads(jpipe.reads(dense(), first), second)
    layers = [
        jpipe.stash(dense(), "a"),
        jpipe.stash(lambda x: x, "b"),
        jnp.tanh,
        jpipe.pop(lambda x, kept: (x, kept), "b"),
        jpipe.pop(lambda x, kept: x[0] + 3.0 * x[1] + 5.0 * kept, "a"),
        jpipe.reads(lambda x, side: x + 7.0 * side[0] * side[1], lambda batch: (first(batch), second(batch))),
    ]
    pipe = make(layers)
    variables = pipe.init(key, BATCH)
    (tree, *_) = jax.device_get(pipe.layer_variables(variables))
    y = dense().apply(tree, BATCH["inputs"])
    assert_close(pipe.apply(variables, BATCH), jnp.tanh(y) + 8.0 * y + 7.0 * BATCH["inputs"] * BATCH["targets"])
    twice = [jpipe.stash(dense(), "a"), jnp.tanh, jpipe.pop(jnp.add, "a"), jpipe.pop(jnp.multiply, "a")]
    with refused(ValueError, "pop a second skip, which an identity behind layer 0 stashes: jpipe.stash(lambda x: x"):
        make(twice)
    twice = [twice[0], jpipe.stash(lambda x: x, "another name"), *twice[1:3], jpipe.pop(jnp.multiply, "another name")]
    pipe = make(twice)
    assert_close(pipe.apply(pipe.from_layer_variables([tree, *[{}] * 4], BATCH), BATCH), (jnp.tanh(y) + y) * y)


TIED = 'to share its parameters, put tied = jpipe.Shared({}(...)) in both places, or tied.using("{}")'


@follows(TIED, "pass a function `apply(params, x)`")
@follows("mark its use: jpipe.stash(jpipe.Shared(layer), 'a')")
def test_shared_layers():
    linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    said = 'put tied = jpipe.Shared(Linear(...)) in both places, or tied.using("a_method")'
    with refused(ValueError, said):
        make([linear, jnp.tanh, linear])
    tied = jpipe.Shared(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    traced(make([tied, jnp.tanh, tied]))
    table, tokens = nn.Embed(16, 8), {"inputs": np.zeros((8, 2), np.int32), "targets": np.zeros((8, 2, 16), np.float32)}
    said = 'put tied = jpipe.Shared(Embed(...)) in both places, or tied.using("attend")'
    with refused(TypeError, said):
        make([table, table.attend])
    tied = jpipe.Shared(nn.Embed(16, 8))
    traced(make([tied, tied.using("attend")]), tokens)
    layer = jpipe.Shared(jpipe.Layer(scale_init, scale))
    with refused(TypeError, "pass a function `apply(params, x)`"):
        make([layer, layer.using("attend")])
    traced(make([layer, layer.using(lambda params, x: x - params)]))
    tied = jpipe.Shared(jpipe.stash(dense(), "a"))
    with refused(TypeError, "mark its use: jpipe.stash(jpipe.Shared(layer), 'a')"):
        make([tied, tied, jpipe.pop(jnp.add, "a")])
    tied = jpipe.Shared(dense())
    traced(make([jpipe.stash(tied, "name"), tied, jpipe.pop(jnp.add, "name")]))


@follows("jpipe.freeze takes one layer; freeze each: [jpipe.freeze(layer, where) for layer in layers]")
@follows("freeze what is in it: jpipe.Shared(jpipe.freeze(layer))")
def test_frozen_layers():
    where = lambda path: path == "kernel"
    layers = [dense() for _ in range(4)]
    with refused(TypeError, "freeze each: [jpipe.freeze(layer, where) for layer in layers]"):
        jpipe.freeze(layers, where)
    traced(make([jpipe.freeze(layer, where) for layer in layers]))
    layer = dense()
    with refused(TypeError, "freeze what is in it: jpipe.Shared(jpipe.freeze(layer))"):
        jpipe.freeze(jpipe.Shared(layer))
    tied = jpipe.Shared(jpipe.freeze(layer))
    traced(make([tied, dense(), tied]))


# --- meshes -----------------------------------------------------------------------------------------------------------


@follows("resize, or pass devices=jax.devices()[:n]")
@follows("pass a Mesh, as jax.make_mesh(({},), ('{}',))")
def test_meshes():
    with refused(ValueError, "resize, or pass devices=jax.devices()[:n]"):
        jpipe.make_mesh(stage=2, data=2)
    traced(make(mesh=jpipe.make_mesh(stage=2, data=2, devices=jax.devices()[:4])))
    with refused(TypeError, "as jax.make_mesh((2,), ('stage',))"):
        make(mesh=2)
    traced(make(mesh=jax.make_mesh((2,), ("stage",))))


@follows("use all devices: jpipe.make_mesh(...)")
@follows("order devices as jpipe.make_mesh({}=..., data=...) does")
def test_rows_of_processes(monkeypatch, make_mesh):
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
    with refused(ValueError, "use all devices: jpipe.make_mesh(...)"):
        data_shard(Imagined(devices[4:].reshape(2, 2), names), ("data",))
    apart = Imagined(devices[[0, 4, 1, 5, 2, 3, 6, 7]].reshape(2, 4), names)
    with refused(ValueError, "order devices as jpipe.make_mesh(stage=..., data=...) does"):
        data_shard(apart, ("data",))
    for sizes, shard in (((1, 8), (0, 2)), ((2, 4), (0, 1)), ((8, 1), (0, 1))):
        mesh = jpipe.make_mesh(stage=sizes[0], data=sizes[1], devices=list(devices))
        assert data_shard(mesh, ("data",)) == shard


def test_collectives_of_a_layer(make_mesh, key):
    """One over stages was let through, and waited for ever."""
    mesh = make_mesh((2, 2), ("stage", "model"))

    def summed(names):
        own = lambda x: jax.lax.axis_index("model").astype(x.dtype) + 0.0 * x
        of_one = lambda x: x + jnp.sum(jax.lax.all_gather(own(x), names), 0)
        whole = PartitionSpec()
        return lambda x: jax.shard_map(of_one, in_specs=whole, out_specs=whole, check_vma=False)(x)

    split = nn.Dense(4, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "model")))
    for names in ("stage", ("stage", "model")):
        with refused(ValueError, "name axes of ['model'] there"):
            traced(make([split, summed(names)], mesh=mesh))
    pipe = make([split, summed("model")], mesh=mesh)
    variables = pipe.init(key, BATCH)
    (tree, _) = jax.device_get(pipe.layer_variables(variables))
    weights = nn.meta.unbox(tree)
    assert_close(pipe.apply(variables, BATCH), dense().apply(weights, BATCH["inputs"]) + 1.0)  # of 0 and 1


# --- schedules, plans and tools ---------------------------------------------------------------------------------------


@follows("a schedule is read from text, got {}; pass Path(...).read_text()")
@follows("pass one that has, as jpipe.make_schedule('1f1b', ...)")
def test_schedules(tmp_path):
    sizes = {"num_stages": 2, "num_microbatches": 4}
    schedule = jpipe.make_schedule("1f1b", **sizes)
    path = tmp_path / "schedule.csv"
    path.write_text(schedule.to_csv())
    with refused(TypeError, "pass Path(...).read_text()"):
        jpipe.Schedule.from_csv(path)
    assert jpipe.Schedule.from_csv(Path(path).read_text(), slots=schedule.slots).actions == schedule.actions
    with refused(ValueError, "pass one that has, as jpipe.make_schedule('1f1b', ...)"):
        jpipe.zero_bubble(jpipe.make_schedule("forward", **sizes))
    assert jpipe.zero_bubble(jpipe.make_schedule("1f1b", **sizes)).splits
    with refused(TypeError, "make one with jpipe.make_schedule"):
        jpipe.simulate("1f1b")


@follows("pass devices such as jax.devices(), or topology=")
def test_a_plan_for_no_devices():
    kept = {"num_stages": 2, "num_microbatches": 2, "balance": [2, 2], "memory": 1e9}
    kept |= {"schedule": "1f1b", "num_chunks": 1, "remat": "layer", "ends": "own", "shard_over": ()}
    layers = [dense() for _ in range(4)]
    with refused(ValueError, "pass devices such as jax.devices(), or topology="):
        jpipe.plan(layers, loss_fn, BATCH, TX, devices=[], **kept)
    for where in ({"topology": "v5e:1x2"}, {"devices": jax.devices()[:2]}):
        assert jpipe.plan(layers, loss_fn, BATCH, TX, **where, **kept)[0].options["num_stages"] == 2


@follows("view(path='pipeline.html')")
def test_a_view_before_any_batch(tmp_path, monkeypatch, capsys):
    with refused(ValueError, "call pipe.init(key, batch) first, or pass a batch"):
        make().view(path=tmp_path / "a.html")
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), BATCH)
    for batch in (BATCH, shapes):
        pipe = make()
        assert pipe.view(batch, path=tmp_path / "a.html").path.exists()
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.chdir(tmp_path)
    pipe.view(path="other.html")
    assert "give the file a name: view(path='pipeline.html')" in capsys.readouterr().out
    assert pipe.view(path="pipeline.html").path.exists()


# --- optimisers -------------------------------------------------------------------------------------------------------


ADAM = "pass an optax transformation, such as optax.adamw(1e-3) (of an optax.MultiSteps its gradient_transformation())"


@follows(ADAM)
def test_what_is_no_optimiser(pipe, key):
    for tx in (optax.adamw, optax.MultiSteps(TX, 2)):
        with refused(TypeError, ADAM):
            pipe.create_state(key, BATCH, tx)
    for tx in (optax.adamw(1e-3), optax.MultiSteps(TX, 2).gradient_transformation()):
        pipe.abstract_state(BATCH, tx)


WRAPPED = (
    "wrap that part of it in jpipe.per_layer(...), as in optax.chain(optax.clip_by_global_norm(1.0), "
    "jpipe.per_layer(optax.lamb(1e-3)))"
)
NOISE = "keep it outside, as in optax.chain(optax.add_noise(...), jpipe.per_layer(...))"


@follows(WRAPPED, NOISE)
def test_optimisers_that_look_at_single_parameters(pipe, key):
    mask = lambda params: jax.tree.map(lambda a: a.ndim > 1, params)
    with refused(ValueError, WRAPPED):
        pipe.create_state(key, BATCH, optax.adamw(1e-3, mask=mask))
    clip = optax.clip_by_global_norm(1.0)
    pipe.abstract_state(BATCH, optax.chain(clip, jpipe.per_layer(optax.adamw(1e-3, mask=mask))))
    by_name = lambda params: unflatten_dict({path: path[-1] != "bias" for path in flatten_dict(params)})
    with refused(ValueError, WRAPPED):  # was an error about pytrees that named no remedy
        pipe.abstract_state(BATCH, optax.adamw(1e-3, mask=by_name))
    pipe.abstract_state(BATCH, optax.chain(clip, jpipe.per_layer(optax.adamw(1e-3, mask=by_name))))
    with jax.numpy_dtype_promotion("standard"), refused(ValueError, WRAPPED):
        pipe.create_state(key, BATCH, optax.lamb(1e-3))
    pipe.abstract_state(BATCH, optax.chain(clip, jpipe.per_layer(optax.lamb(1e-3))))
    noise = optax.add_noise(0.1, 0.5, key=0)
    with refused(TypeError, NOISE):
        pipe.create_state(key, BATCH, jpipe.per_layer(optax.chain(noise, optax.adamw(1e-3))))
    pipe.abstract_state(BATCH, optax.chain(noise, jpipe.per_layer(optax.adamw(1e-3))))


def test_masks_in_a_loop_of_ones_own(pipe, state):
    """A mask that wasn't in `per_layer` was not noticed where no `create_state` saw it."""
    params = state.variables["params"]
    by_shape = lambda params: jax.tree.map(lambda a: a.ndim > 1, params)
    labels = lambda params: jax.tree_util.tree_map_with_path(lambda path, _: str(path[-1].key == "bias"), params)
    parts = {"True": optax.sgd(0.1), "False": optax.adam(0.1)}
    for tx in (optax.adamw(1e-3, mask=by_shape), optax.multi_transform(parts, labels)):
        with refused(ValueError, WRAPPED):
            tx.init(params)
        wrapped = jpipe.per_layer(tx)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
            jax.eval_shape(lambda p, tx=wrapped: tx.update(p, tx.init(p), p), params)
    finite = jax.tree.map(lambda a: bool(jnp.all(jnp.isfinite(a))), params)
    assert all(jax.tree.leaves(finite)) and jax.tree.map(lambda a: a, finite) == finite


# --- arguments that are proposed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 3, 4])
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 2), ("gpipe", 3), ("naive", 2), ("v", 1), ("v", 4)])
def test_schedules_of_other_numbers_of_chunks(name, chunks, microbatches):
    sizes = {"num_stages": 2, "num_microbatches": microbatches}
    with pytest.raises(ValueError, match=r"use schedule='interleaved' or num_chunks=\d$") as info:
        jpipe.make_schedule(name, **sizes, num_chunks=chunks)
    proposed = int(str(info.value)[-1])
    assert jpipe.make_schedule(name, **sizes, num_chunks=proposed).num_chunks == proposed
    assert jpipe.make_schedule("interleaved", **sizes, num_chunks=chunks).num_chunks == chunks


def test_remat_and_schedules():
    again = jpipe.Schedule([["F0", "R0", "B0", "F1", "R1", "B1"]] * 2, slots=("F", "RB"))
    for schedule, bad, good, others in (
        ("zero_bubble", ("stage", "full"), ("none", "layer", jax.checkpoint_policies.dots_saveable), ("1f1b", "gpipe")),
        (again, ("none", "layer"), ("stage", "full"), ("1f1b", "zero_bubble")),
    ):
        for remat in bad:
            with pytest.raises(ValueError, match=r"use remat=\"(none|stage)\".* or a schedule without [WR]$"):
                make(schedule=schedule, remat=remat)
            for other in others[: 1 + (remat in ("none", "layer"))]:
                make(schedule=other, remat=remat)
        for remat in good:
            make(schedule=schedule, remat=remat)


def test_shared_ends_and_schedules():
    words = {"inputs": np.zeros((8, 2), np.int32), "targets": np.zeros((8, 2), np.int32)}
    loss = lambda y, b: optax.softmax_cross_entropy_with_integer_labels(y, b["targets"]).mean()
    layers = [nn.Embed(512, 128), dense(128), nn.Dense(512)]
    with refused(ValueError, "use schedule='1f1b', or ends='spread'"):
        make(layers, loss, schedule="gpipe", ends="shared")
    planned(make(layers, loss, schedule="1f1b", ends="shared"), words)
    planned(make(layers, loss, schedule="gpipe", ends="spread"), words)
    chunks, layers = {"num_chunks": 2, "ends": "shared"}, [layers[0], *[dense(128) for _ in range(3)], layers[-1]]
    for schedule in ("interleaved", "zero_bubble"):  # the remedy was the schedule that is refused here
        with refused(ValueError, "schedule='interleaved' and a num_microbatches that 2 divides, or ends='spread'"):
            make(layers, loss, schedule=schedule, num_microbatches=5, **chunks)
        planned(make(layers, loss, schedule=schedule, num_microbatches=8, **chunks), words)
        planned(make(layers, loss, schedule=schedule, num_microbatches=8, **chunks | {"ends": "spread"}), words)
    odd = [nn.Embed(513, 129), dense(129), nn.Dense(513)]
    with refused(ValueError, "pad the vocabulary to a multiple of K, or use ends='spread'"):
        planned(make(odd, loss, ends="shared"), words)
    planned(make([nn.Embed(514, 129), dense(129), nn.Dense(514)], loss, ends="shared"), words)
    planned(make(odd, loss, ends="spread"), words)


def test_sizes(make_mesh):
    with pytest.raises(ValueError, match="num_stages=5 is more than the 4 layers; use 1 to 4"):
        make(num_stages=5)
    make(num_stages=4)
    make([dense() for _ in range(5)], num_stages=5)
    with refused(ValueError, "use num_stages <= 8, pass mesh="):
        make([dense()] * 9, num_stages=9)
    traced(make([dense() for _ in range(9)], num_stages=8))
    pipe = make(mesh=make_mesh((2, 2), ("stage", "data")), num_microbatches=8)
    with refused(ValueError, "use a multiple of 16"):
        pipe.planner.for_training(BATCH)
    pipe.planner.for_training(jax.tree.map(lambda a: np.ones((16, 4), np.float32), BATCH))
    with pytest.raises(ValueError, match="place a multiple of 2 rows"):
        pipe.place(np.ones((3, 4)))
    pipe.place(np.ones((4, 4)))


def test_balances():
    for balance in ([1, 2], [1, 1, 2], [0, 4]):
        with refused(ValueError, "such as [2, 2]"):
            make(balance=balance)
    make(balance=[2, 2])
    cuts = jpipe.partition([1.0, 1.0, 1.0, 3.0], 2)
    with refused(TypeError, "balance=partition.counts"):
        make(balance=cuts)
    assert make(balance=cuts.counts).partition.counts == cuts.counts == (3, 1)
    with refused(ValueError, "or one cost a layer as floats"):
        make(balance="equal")
    assert make(balance=[1.0, 1.0, 1.0, 3.0]).partition.counts == (3, 1)


def test_actions_and_slots():
    proposal = 'use Action("F", 0), ("F", 0), ("F", 0, 1), "F0" or "F0.1"'
    with refused(TypeError, proposal):
        jpipe.Schedule([[0, "B0"]])
    for first in (jpipe.Action("F", 0), ("F", 0), "F0"):
        assert jpipe.Schedule([[first, "B0"]]).actions == jpipe.Schedule([["F0", "B0"]]).actions
    for second in (("F", 0, 1), "F0.1"):
        assert jpipe.Schedule([["F0", second, "B0.1", "B0"]]).num_chunks == 2
    with refused(ValueError, 'as ("F", "B")'):
        jpipe.Schedule([["F0", "B0"]], slots=())
    assert jpipe.Schedule([["F0", "B0"]], slots=("F", "B")).slots == ("F", "B")
    with refused(ValueError, 'give each stage some, as ["F0"]'):
        jpipe.Schedule([[]])
    jpipe.Schedule([["F0"]])


def test_topologies():
    with pytest.raises(ValueError, match="pass a chip and a shape such as one of ") as info:
        parse_topology("v9:2x2")
    for name in str(info.value).rpartition("one of ")[2].split(", "):
        assert str(parse_topology(name)) == name
    with refused(ValueError, "pass hosts and the GPUs of each, such as h100:2x8"):
        parse_topology("h100:16")
    assert parse_topology("h100:2x8").num_devices == 16


def test_losses_of_several_parts():
    count = lambda y, b: jnp.mean((y > b["targets"]).astype(jnp.float32))
    wrong = make(loss=lambda y, b: (loss_fn(y, b), count(y, b)))
    with pytest.raises(ValueError, match=r"or \(loss, 1\.0, {'accuracy': accuracy}\)"):
        wrong.planner.plan_for(BATCH)
    right = make(loss=lambda y, b: (loss_fn(y, b), 1.0, {"accuracy": count(y, b)}))
    _, metrics = jax.eval_shape(right.train_step, right.abstract_state(BATCH, TX), BATCH)
    assert metrics["accuracy"].shape == metrics["loss"].shape == ()


def test_callbacks():
    def counts(x):
        io_callback(lambda _: None, None, x)
        return x

    proposal = "use jax.debug.callback, or jax.pure_callback inside of a jax.custom_vjp"
    with refused(ValueError, proposal):
        traced(make([dense(), counts]))

    def tells(x):
        jax.debug.callback(lambda _: None, x)
        return x

    @jax.custom_vjp
    def doubled(x):
        return jax.pure_callback(lambda a: 2 * a, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    doubled.defvjp(lambda x: (doubled(x), None), lambda _, cotangent: (2 * cotangent,))
    traced(make([dense(), tells, lambda x: doubled(x)]))


def test_sown_values():
    class Sows(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("losses", "size", jnp.mean(x**2))
            return nn.Dense(4)(x)

    class Passes(nn.Module):
        @nn.compact
        def __call__(self, x, total):
            return nn.Dense(4)(x), total + jnp.mean(x**2, -1)

    proposal = "pass the values on, `return x, total + value`"
    with refused(ValueError, proposal):
        traced(make([dense(), Sows()]))
    first = lambda x: (x, jnp.zeros(len(x), x.dtype))
    traced(make([first, Passes(), Passes()], lambda y, b: loss_fn(y[0], b) + jnp.mean(y[1])))


def test_nothing_is_split_over_an_axis(make_mesh):
    mesh = make_mesh((2, 2), ("stage", "model"))
    split = nn.Dense(4, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "model")))
    logical = nn.Dense(4, kernel_init=nn.with_logical_partitioning(nn.initializers.ones, (None, "wide")))
    constrained = lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec(None, "model"))
    proposal = r"Name it in batch_axes= or layers' metadata \(nn\.with_partitioning, nn\.logical_axis_rules\)"
    with pytest.warns(UserWarning, match=proposal):
        make(mesh=mesh).planner.plan_for(BATCH)
    ways = ([dense(), dense()], {"batch_axes": "model"}), ([split, dense()], {}), ([dense(), constrained], {})
    for layers, options in ways:
        make(layers, mesh=mesh, **options).planner.plan_for(BATCH)  # a warning would be an error
    with nn.logical_axis_rules([("wide", "model")]):
        make([logical, dense()], mesh=mesh).planner.plan_for(BATCH)
    make().planner.plan_for(BATCH)


# --- all of them ------------------------------------------------------------------------------------------------------

CALL = re.compile(r"\b(jpipe|jax|pipe|optax|nn|nnx|np|tied|other|trained|Path)\b[\w.]*\(|\blambda\b")
"""What proposes code: a call of one of the modules that users have, or of what they have made; or a function."""
# --- outputs, losses, states of other pipelines -----------------------------------------------------------------------


@follows("pipe.apply(variables, batch, bare=False), or pipe.apply(variables, inputs, bare=True)")
def test_what_may_be_a_batch_or_inputs():
    pipe = make(None, lambda y, b: jnp.mean(y), inputs=lambda batch: 2 * batch)
    x = BATCH["inputs"]
    variables = pipe.init(jax.random.key(0), x)
    with refused(ValueError, "say which: pipe.apply(variables, batch, bare=False)"):
        pipe.apply(variables, x)
    assert_close(pipe.apply(variables, x, bare=False), pipe.apply(variables, 2 * x, bare=True), "outputs")


@follows(
    "make one with a loss: jpipe.Pipeline(layers, loss_fn, ...)",
    "go from one to the other by a jpipe.Checkpointer",
)
def test_a_pipeline_without_a_loss_and_a_state_of_other_stages():
    """Weights go from one to the other as both errors propose."""
    serving, pipe = make(None, None), make(None, loss_fn, num_stages=4)
    variables = serving.init(jax.random.key(0), BATCH)
    with refused(ValueError, "make one with a loss"):
        serving.evaluate(variables, BATCH)
    brought = pipe.from_layer_variables(serving.layer_variables(variables), BATCH)
    with refused(ValueError, "begin with pipe.from_layer_variables("):
        pipe.place_state(optax.adam(0.1).init(variables["params"]), optax.adam(0.1))
    pipe.place_state(optax.adam(0.1).init(brought["params"]), optax.adam(0.1))
    assert np.isfinite(pipe.evaluate(brought, BATCH))


# --- what follows from the batch --------------------------------------------------------------------------------------


class ActNorm(nn.Module):
    """Its initial values follow from the first batch."""

    @nn.compact
    def __call__(self, x):
        return x * self.param("scale", lambda key: 1 / (jnp.std(x, 0) + 1e-6))


class Flow(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = jnp.tanh(nn.Dense(4)(ActNorm()(x)))
        return x


ROWS = {name: np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32) for name in ("inputs", "targets")}
OF_LISTS = "pipe.from_layer_variables(trees, batch)"


@follows("use pipe.from_model_variables(model.init(key, x), batch), or {}")
def test_initial_values_of_the_first_batch(key):
    """Loss and gradients are those of the plain model from its own initial values."""
    model, batch, x = Flow(), ROWS, ROWS["inputs"]
    pipe = make(model)
    with refused(ValueError, "use pipe.from_model_variables(model.init(key, x), batch)"):
        pipe.init(key, batch)
    tree = model.init(key, x)
    variables = pipe.from_model_variables(tree, batch)
    state = pipe.create_state(key, batch, TX, variables)
    plain = jax.value_and_grad(lambda params: loss_fn(model.apply({"params": params}, x), batch))(tree["params"])
    (loss, _), grads = pipe.value_and_grad(variables, batch)
    assert_close((loss, pipe.model_variables({"params": grads})["params"]), plain, "of one module")
    assert_close(pipe.model_variables(state.variables), tree, "a state's variables")


@follows(OF_LISTS)
def test_initial_values_of_the_first_batch_of_a_list(key):
    layers = [ActNorm(), dense(), jpipe.Layer(lambda key, x: jnp.mean(x, 0), lambda bias, x: x - bias), dense()]
    pipe, batch, x, trees = make(layers), ROWS, ROWS["inputs"], []
    with refused(ValueError, OF_LISTS):
        pipe.init(key, batch)
    call = lambda layer, tree, x: layer.apply(tree, x)
    for i, layer in enumerate(layers):
        trees.append(layer.init(jax.random.fold_in(key, i), x))
        x = call(layer, trees[-1], x)

    def plain(trees):
        x = batch["inputs"]
        for layer, tree in zip(layers, trees, strict=True):
            x = call(layer, tree, x)
        return loss_fn(x, batch)

    (loss, _), grads = pipe.value_and_grad(pipe.from_layer_variables(trees, batch), batch)
    assert_close((loss, pipe.layer_variables({"params": grads})), jax.value_and_grad(plain)(trees), "of a list")


class Memory(nn.Module):
    """Adds what it saw in the step before, which it keeps."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        last = self.variable("memory", "last", lambda: jnp.zeros(x.shape, x.dtype))
        y = x + jnp.tanh(last.value)
        if train and not self.is_initializing():
            last.value = x
        return y


class Recurrent(nn.Module):
    """The same as one module, with the memory as the remedy has it: taken, and given."""

    @nn.compact
    def __call__(self, x, last):
        new = nn.Dense(4)(x)
        return nn.Dense(4)(new + jnp.tanh(last)), new


def test_state_by_example_that_the_batch_has():
    """Two steps, of which the second goes on from the first: what it gives is the plain model's, with its gradients."""
    inputs = lambda batch: (batch["inputs"], batch["memory"])
    loss = lambda outputs, batch: loss_fn(outputs[0], batch)
    layers = [lambda x, last: (x + jnp.tanh(last), x), lambda y, new: (jnp.sin(y), new)]
    head = jpipe.Layer(lambda key, y, new: jax.random.normal(key, (4, 4)), lambda w, y, new: (y @ w, new))
    batches = [ROWS, {name: rows[::-1] for name, rows in ROWS.items()}]
    with refused(ValueError, "pass it in the batch, or use num_microbatches=1"):
        make([Memory(), dense()]).init(jax.random.key(0), ROWS)
    for model in ([*layers, head], Recurrent()):
        is_list, memory = isinstance(model, list), np.zeros((8, 4), np.float32)
        pipe = make(model, loss, inputs=inputs)
        variables = pipe.init(jax.random.key(0), ROWS | {"memory": memory})
        applies, all_outputs = pipe, variables
        tree = pipe.layer_variables(variables)[2] if is_list else pipe.model_variables(variables)
        if not is_list:  # of one module a pipeline gives what its loss reads; one without a loss gives all
            applies = make(model, None, inputs=inputs)
            all_outputs = applies.from_model_variables(tree, ROWS | {"memory": memory})

        def plain(tree, x, memory, is_list=is_list, model=model):
            if is_list:
                return jnp.sin(x + jnp.tanh(memory)) @ tree, x
            return model.apply(tree, x, memory)

        expected = memory
        for batch in batches:
            whole = batch | {"memory": memory}
            (value, _), grads = pipe.value_and_grad(variables, whole)
            run = lambda tree, batch=batch, m=expected: loss_fn(plain(tree, batch["inputs"], m)[0], batch)
            found = pipe.layer_variables({"params": grads})[2] if is_list else pipe.model_variables({"params": grads})
            assert_close((value, found), jax.value_and_grad(run)(tree), "loss and gradients")
            memory, expected = applies.apply(all_outputs, whole)[1], plain(tree, batch["inputs"], expected)[1]
            assert_close(memory, expected, "memory")


def test_state_by_example_of_a_single_micro_batch():
    """The other remedy: after two steps the memory is the plain model's, and so is the loss that reads it."""
    pipe, head = make([Memory(), dense()], num_microbatches=1), dense()
    state = pipe.create_state(jax.random.key(0), ROWS, optax.sgd(0.0))
    first, last = jax.device_get(pipe.layer_variables(state.variables))
    for batch in (ROWS, {name: rows[::-1] for name, rows in ROWS.items()}):
        y, first = Memory().apply(first, batch["inputs"], True, mutable=["memory"])
        state, metrics = pipe.train_step(state, batch)
        assert_close(metrics["loss"], loss_fn(head.apply(last, y), batch), "loss")
        assert_close(pipe.layer_variables(state.variables)[0], first, "memory")


ELSEWHERE = {
    "give pipe.place(batch), with the rows that this process feeds (pipe.data_shard)": "helpers/process_worker.py",
    "bring it to the hosts first: jax.experimental.multihost_utils.process_allgather(array, tiled=True)": (
        "helpers/process_worker.py"
    ),
    "pass pipe.from_layer_variables(trained.layer_variables(variables), batch)": "execution/test_decoding.py",
    "call it with pipe.model_variables(variables)": "end_to_end/test_whole_corners.py",
    "outside: optax.chain(optax.clip_by_global_norm(1.0), jpipe.per_layer(...)), optax.apply_if_finite(": (
        "end_to_end/test_whole_checkpoints.py"
    ),
    "Say which are logits: pipe.generate(..., logits=lambda outputs: outputs[0])": "execution/test_decoding.py",
    "by jax.jit(pipe.train_step).lower(state, batch).compile()": "end_to_end/test_tpu.py",
    "jpipe.profile(pipe, state, batch) takes a jpipe.Pipeline": "tools/test_profile.py",
    "move it: state = pipe.place_state(state, tx)": "training/test_by_slices.py",
    "x = jpipe.cut(x)": "end_to_end/test_whole_models.py",
    "pipe.communication(batch) shows what that sends": "tools/test_communication.py",
    "name the axes that it is about: jax.shard_map(..., axis_names={...})": "partitioner/test_per_device.py",
}
"""Proposals that are followed in tests of their own, which need several processes, trained models or time."""
NO_PROPOSALS = {
    "jpipe.Shared.using({}): pass a method's name, or a function",
    "jpipe.reads({}, {}): pass a function",
}
"""Texts that repeat what the user wrote."""


def texts(tree):
    """The texts of a module besides its docstrings, those of f-strings with {} for values."""
    within = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (within | documents):
            yield node.value.replace("{!r}", "{}")


def test_every_proposal_is_followed():
    """A new text that proposes code needs a test that does what it says, noted by `follows`."""
    known = {*FOLLOWED, *ELSEWHERE, *NO_PROPOSALS}
    paths = Path(jpipe.__file__).parent.rglob("*.py")
    found = [(path.name, text) for path in paths for text in texts(ast.parse(path.read_text()))]
    missing = [f"{name}: {text}" for name, text in found if CALL.search(text) and not any(p in text for p in known)]
    assert not missing, "\n".join(missing)
    gone = [part for part in known if not any(part in text for _, text in found)]
    assert not gone, "no text of the package says this any more:\n" + "\n".join(gone)


@pytest.mark.parametrize("proposal", ELSEWHERE)
def test_proposals_that_are_followed_elsewhere(proposal):
    """Those tests name the call."""
    call = re.findall(r"[\w.]+(?=\()", proposal)[0].rpartition(".")[2]
    assert f".{call}(" in (Path(__file__).parents[1] / ELSEWHERE[proposal]).read_text()
