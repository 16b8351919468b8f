"""Bad input: a clear error, before anything is compiled, that names the offender, its value and the remedy."""

import copy
import pickle
import re
import traceback

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization, struct
from flax.core import FrozenDict
from jax.experimental import io_callback

import jpipe
from cases import NnxDrops, assert_equal, compilations
from small_pipeline import dense, loss_fn, make

BATCH = {"inputs": np.ones((8, 4), np.float32), "targets": np.zeros((8, 4), np.float32)}


@pytest.fixture(scope="module")
def key():
    return jax.random.key(0)


@pytest.fixture(scope="module")
def ready(key):
    """A pipeline, its variables and its state."""
    pipe = make()
    return pipe, pipe.init(key, BATCH), pipe.create_state(key, BATCH, optax.sgd(0.1))


@pytest.fixture
def nothing_compiles(key):
    """Checks that the test compiled nothing."""
    with compilations() as count:
        yield
        assert count() == 0, "the error came after something was compiled"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_stages": 5}, ValueError, r"num_stages=5 .* 4 layers; use num_stages \* num_chunks <= 4"),
        ({"num_stages": 2, "num_chunks": 3, "schedule": "interleaved"}, ValueError, "num_chunks=3 .* 4 layers"),
        ({"layers": [dense() for _ in range(9)], "num_stages": 9}, ValueError, "num_stages=9 .* 8 cpu devices"),
        ({"num_stages": 0}, ValueError, "num_stages=0 is less than 1"),
        ({"num_stages": 2.0}, TypeError, "num_stages=2.0 is no integer"),
        ({"num_stages": True}, TypeError, "num_stages=True is no integer"),
        ({"num_microbatches": 0}, ValueError, "num_microbatches=0 is less than 1"),
        ({"num_microbatches": "4"}, TypeError, "num_microbatches='4' is no integer"),
        ({"num_chunks": 0}, ValueError, "num_chunks=0 is less than 1"),
        ({"num_chunks": 2, "schedule": "1f1b"}, ValueError, "'1f1b'.*(?s:.)*num_chunks=2|num_chunks=2(?s:.)*'1f1b'"),
        ({"num_chunks": 2, "schedule": "gpipe"}, ValueError, "interleaved"),
        ({"schedule": "2f2b"}, ValueError, "schedule='2f2b' is unknown.*'naive', 'gpipe', '1f1b', 'interleaved'"),
        ({"schedule": 1}, TypeError, "schedule=1 must be a name or a jpipe.Schedule"),
        ({"schedule": "forward"}, ValueError, "no backward actions"),
        ({"remat": "some"}, ValueError, r"remat='some' is unknown.*'full', 'layer', 'none', 'stage'"),
        ({"remat": 1}, TypeError, "remat=1 is neither a name"),
        ({"remat": None}, TypeError, "remat=None is neither a name"),
        ({"balance": "equal"}, ValueError, r"balance='equal' is unknown.*'flops', 'time', 'size', 'even'"),
        ({"balance": [1, 1, 2]}, ValueError, r"balance=\[1, 1, 2\] has 3 layer counts; .* 2 of them, such as \[2, 2\]"),
        ({"balance": [1, 2]}, ValueError, r"balance=\[1, 2\] sums to 3, not 4 layers; .* such as \[2, 2\]"),
        ({"balance": [0, 4]}, ValueError, r"balance=\[0, 4\] has a stage without layers; .* such as \[2, 2\]"),
        ({"balance": [-1, 5]}, ValueError, r"balance=\[-1, 5\] has a stage without layers"),
        ({"balance": [1.0, 2.0]}, ValueError, "balance has 2 costs but there are 4 layers"),
        ({"balance": [1.0, 2.0, -1.0, 1.0]}, ValueError, r"-1\.0"),
        ({"balance": [1.0, 2.0, float("nan"), 1.0]}, ValueError, "nan"),
        ({"balance": 2}, TypeError, "balance=2 is neither"),
        ({"balance": ["flops", "size"]}, TypeError, "balance=.* is neither"),
        ({"layers": []}, ValueError, "layers is empty"),
        ({"layers": nn.Sequential([])}, ValueError, "layers is empty"),
        ({"layers": 3}, TypeError, "layers is a int; pass a model that is one module"),
        ({"layers": "dense"}, TypeError, "layers is a str"),
        ({"layers": [dense(), 3]}, TypeError, r"layers\[1\] is a int; use a module"),
        ({"layers": [dense(), None]}, TypeError, r"layers\[1\] is a NoneType"),
        ({"layers": [nn.Dense, dense()]}, TypeError, r"layers\[0\] is the class Dense, .*; call it"),
        ({"layers": [dense(), lambda rngs: 3]}, TypeError, r"layers\[1\] takes rngs.* returned int"),
        ({"loss": 3}, TypeError, "loss_fn=3 is not callable"),
        ({"inputs": "inputs"}, TypeError, "inputs='inputs' is not callable"),
        ({"mesh": 4}, TypeError, "mesh is a int"),
    ],
)
@pytest.mark.usefixtures("key")  # jpipe makes a key to trace with; so that this isn't its first
def test_arguments_of_the_pipeline(options, error, message):
    with compilations() as count, pytest.raises(error, match=message):
        make(**options)
    assert count() == 0


def test_bound_linen_module():
    bound = dense().bind({"params": {"kernel": np.ones((4, 4), np.float32), "bias": np.ones(4, np.float32)}})
    with pytest.raises(TypeError, match=r"layers\[0\] \(Dense\) is a bound linen module; pass it unbound"):
        make([bound, dense()])


def test_functions_of_a_layer():
    with pytest.raises(TypeError, match=r"jpipe\.Layer: init=None is not callable"):
        jpipe.Layer(None, lambda params, x: x)
    with pytest.raises(TypeError, match=r"jpipe\.Layer: apply=3 is not callable"):
        jpipe.Layer(lambda key, x: (), 3)


def test_mesh_without_a_stage_axis(make_mesh):
    with pytest.raises(ValueError, match=r"mesh has the axes \('data', 'model'\) but no axis 'stage'"):
        make(mesh=make_mesh((2, 2), ("data", "model")))


def test_mesh_with_a_stage_axis_of_another_size(make_mesh):
    with pytest.raises(ValueError, match="mesh has 4 devices along 'stage' but num_stages=2"):
        make(mesh=make_mesh((4,)))


@pytest.mark.parametrize("size", [{"num_stages": 3}, {"num_microbatches": 4}, {"num_chunks": 2}])
def test_schedule_made_for_other_sizes(size):
    schedule = jpipe.make_schedule("1f1b", num_stages=2, num_microbatches=2)
    (name, value), *_ = size.items()
    with pytest.raises(ValueError, match=f"{name}={value}, but the schedule '1f1b' was made for"):
        make(schedule=schedule, **size)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([["F0", "B0"], ["B0", "F0"]], "(?s)B0.*stage 1.*F0|stage 1.*B0.*F0"),
        ([["F0", "B0"], ["F0"]], "(?s)stage 1.*B0|B0.*stage 1"),
        ([["F0", "F0", "B0"], ["F0", "B0"]], "(?s)F0.*stage 0.*|stage 0.*F0"),
        ([["B0", "F0"], ["F0", "B0"]], "(?s)B0"),
    ],
)
def test_invalid_schedule(actions, message):
    with pytest.raises(ValueError, match=message):
        jpipe.Schedule(actions)


@pytest.mark.usefixtures("nothing_compiles")
class TestBatch:
    """Batches that don't fit, whatever is done with them."""

    @pytest.mark.parametrize(
        ("batch", "error", "message"),
        [
            (
                {"inputs": np.ones((30, 4), np.float32), "targets": np.ones((30, 4), np.float32)},
                ValueError,
                "batch size 30 is not divisible by num_microbatches=4; use 1, 2, 3, 5, 6, 10, 15 or 30",
            ),
            ({"inputs": np.ones((0, 4), np.float32)}, ValueError, "batch size 0"),
            ({"inputs": np.ones((8, 4), np.float32), "targets": 3.0}, TypeError, r"batch\['targets'\] is a float"),
            ({"inputs": np.ones((8, 4), np.float32), "t": np.float32(3)}, ValueError, r"batch\['t'\] is a scalar"),
            (
                {"inputs": np.ones((8, 4), np.float32), "targets": np.ones((4, 4), np.float32)},
                ValueError,
                r"batch\['inputs'\] has 8, batch\['targets'\] has 4",
            ),
            ({"x": np.ones((8, 4), np.float32)}, ValueError, r"the keys \['x'\] and no 'inputs'"),
            ({}, ValueError, "the batch holds no arrays"),
            ((), ValueError, "the batch"),
            (None, ValueError, "the batch holds no arrays"),
            ("text", TypeError, "batch is a str, not an array"),
        ],
    )
    def test_at_init(self, batch, error, message, key):
        with pytest.raises(error, match=message):
            make(num_microbatches=4).init(key, batch)

    def test_not_divisible_later(self, ready):
        pipe, variables, state = ready
        batch = jax.tree.map(lambda a: a[:5], BATCH)
        with pytest.raises(ValueError, match="batch size 5 is not divisible by num_microbatches=2; use 1 or 5"):
            pipe.value_and_grad(variables, batch)
        with pytest.raises(ValueError, match="batch size 5 is not divisible by num_microbatches=2; use 1 or 5"):
            pipe.train_step(state, batch)

    def test_micro_batch_not_divisible_by_the_data_axis(self, key, make_mesh):
        pipe = make(mesh=make_mesh((2, 2), ("stage", "data")), num_microbatches=8)
        with pytest.raises(
            ValueError, match=r"batch size 8 isn't divisible by num_microbatches=8 \* 2 .* multiple of 16"
        ):
            pipe.init(key, BATCH)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                lambda b: {"inputs": b["inputs"]},
                r"batch has another structure than at init: it lacks batch\['targets'\]",
            ),
            (lambda b: b | {"mask": b["inputs"]}, r"batch has another structure than at init: it has batch\['mask'\]"),
            (lambda b: (b["inputs"], b["targets"]), "batch has another structure than at init"),
        ],
    )
    def test_other_structure_than_at_init(self, ready, change, message):
        pipe, variables, state = ready
        for call in (lambda b: pipe.value_and_grad(variables, b), lambda b: pipe.train_step(state, b)):
            with pytest.raises(ValueError, match=message):
                call(change(BATCH))

    def test_other_shape_than_the_parameters_take(self, ready):
        pipe, variables, _ = ready
        batch = {"inputs": np.ones((8, 6), np.float32), "targets": np.ones((8, 4), np.float32)}
        with pytest.raises(ValueError, match=r"layer 0 \(Dense\)"):
            pipe.value_and_grad(variables, batch)


class Residual(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(self.width)(x)


class Untold(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5)(x)


@pytest.mark.usefixtures("nothing_compiles")
class TestLayers:
    """Layers that don't fit each other."""

    def test_both_layers_and_both_shapes_are_named(self, key):
        layers = [dense(), lambda rngs: nnx.Linear(5, 4, rngs=rngs)]
        with pytest.raises(
            ValueError, match=r"(?s)layer 1 \(Linear\).*layer 0 \(Dense\) takes .* gives float32\[4,4\]\n.*\[5,4\]"
        ):
            make(layers).init(key, BATCH)

    def test_the_layer_at_fault_is_named_with_its_line(self, key):
        """A regression: "layer 1 can't take what layer 0 gives", where its own Dense was too wide, under 65 lines."""
        with pytest.raises(ValueError) as info:
            make([dense(), Residual(6), dense()]).init(key, BATCH)
        first, *others = str(info.value).split("\n")
        assert re.fullmatch(
            r"layer 1 \(Residual\) raised TypeError at test_errors.py:\d+, `return x \+ nn\.Dense\(self\.width\)\(x\)`"
            r": add got incompatible shapes .*: \(4, 4\), \(4, 6\)",
            first,
        )
        held = "  the batch holds as inputs: float32[4,4]"
        assert others == [held, "  layer 0 (Dense) takes float32[4,4], gives float32[4,4]"]
        cause = info.value.__cause__
        assert isinstance(cause, TypeError)
        assert [frame.name for frame in traceback.extract_tb(cause.__traceback__)] == ["__call__"]
        assert len(traceback.format_exception(info.value)) < 20

    def test_the_layer_that_changed_the_width_is_named(self, key):
        """However many layers before: here the next ones take any."""
        layers = [dense(), dense(6), jnp.tanh, jnp.sin, lambda rngs: nnx.Linear(4, 4, rngs=rngs)]
        with pytest.raises(ValueError) as info:
            make(layers).init(key, BATCH)
        assert str(info.value).split("\n")[1:] == [
            "  layer 1 (Dense) takes float32[4,4], gives float32[4,6]",
            "  layer 3 (sin) takes float32[4,6], gives float32[4,6]",
            "  layer 4 (Linear) has the parameters {'bias': float32[4], 'kernel': float32[4,4]}",
        ]

    def test_no_rngs_for_a_module(self, key):
        """A regression: a raw error that named no layer."""
        with pytest.raises(
            TypeError, match=r"layers\[1\] raised TypeError at .*'rngs'; .* lambda rngs: Block\(width, "
        ):
            make([dense(), lambda rngs: nnx.Linear(4, 4)])

    def test_dropout_that_is_not_told_whether_it_trains(self, key):
        with pytest.raises(ValueError, match=r"layer 0 \(Untold\) raised .*Whether it trains, a layer is told by"):
            make([Untold(), dense()]).init(key, BATCH)

    def test_wrong_number_of_arguments(self, key):
        pair = lambda x: (x, x)
        with pytest.raises(ValueError, match=r"(?s)layer 1 \(Dense\).*layer 0 .* gives \(float32\[4,4\], float32"):
            make([pair, dense()]).init(key, BATCH)

    def test_first_layer_and_batch(self, key):
        layers = [lambda rngs: nnx.Linear(5, 4, rngs=rngs), dense()]
        with pytest.raises(ValueError, match=r"(?s)layer 0 \(Linear\).*the batch.*float32\[4,4\].*\[5,4\]"):
            make(layers).init(key, BATCH)

    def test_string_at_a_boundary(self, key):
        with pytest.raises((TypeError, ValueError), match=r"(?s)layer 0.*str"):
            make([lambda x: {"x": x, "name": "first"}, lambda tree: tree["x"]]).init(key, BATCH)

    def test_random_key_at_a_boundary(self, key):
        layers = [lambda x: {"x": x, "key": jax.random.key(0)}, lambda tree: tree["x"]]
        with pytest.raises(ValueError, match=r"layer 0 .* gives key.* at \['key'\]"):
            make(layers).init(key, BATCH)

    def test_integer_parameters(self, key):
        layer = jpipe.Layer(lambda key, x: {"w": jnp.arange(4)}, lambda params, x: x * params["w"], name="scale")
        with pytest.raises(ValueError, match=r"layer 0 \(scale\) has the parameter \['w'\] of dtype int32"):
            make([layer, dense()]).init(key, BATCH)

    def test_parameters_that_are_no_arrays(self, key):
        layer = jpipe.Layer(lambda key, x: {"w": "none"}, lambda params, x: x, name="scale")
        with pytest.raises((TypeError, ValueError), match=r"(?s)layer 0 \(scale\).*str"):
            make([layer, dense()]).init(key, BATCH)

    @pytest.mark.parametrize(
        ("loss", "message"),
        [
            (lambda y, b: y, r"loss_fn returned float32\[4,4\]; .* scalar"),
            (lambda y, b: (jnp.sum(y), jnp.sum(y), jnp.sum(y)), r"loss_fn returned \(float32\[\], float32.* a dict"),
            (lambda y, b: (jnp.sum(y), y), r"loss_fn returned \(float32\[\], float32\[4,4\]"),
            (lambda y, b: jnp.sum(y > 0), "loss of dtype int32"),
            (lambda y, b: None, "loss_fn returned None"),
            (lambda y, b: (), r"loss_fn returned \(\)"),
            (lambda y, b: {"loss": jnp.sum(y)}, "loss_fn returned a loss as 'loss'"),
            (lambda y, b: (jnp.sum(y), None), "loss_fn returned"),
        ],
    )
    def test_loss(self, key, loss, message):
        with pytest.raises(ValueError, match=message):
            make(loss=loss).init(key, BATCH)


class Masked(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        return nn.Dense(4)(x) * mask


@pytest.mark.usefixtures("nothing_compiles")
def test_a_layer_that_wants_more_than_one_argument(key):
    for layers in ([Masked(), dense()], [dense(), Masked()]):
        with pytest.raises(ValueError, match=r"Masked.*'mask'\. .* A layer before it can give a tuple.*jpipe\.reads"):
            make(layers).init(key, BATCH)


def test_python_number_at_a_boundary(key):
    with pytest.raises((TypeError, ValueError), match=r"layer 0 .*float.*\['scale'\]"):
        make([lambda x: {"x": x, "scale": 2.0}, lambda tree: tree["x"]]).init(key, BATCH)


class Drops(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic):
        return nn.Dropout(0.5)(x, deterministic=deterministic)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (Drops(), "Drops"),
        (lambda rngs: NnxDrops(rngs=rngs), "NnxDrops"),
        (
            jpipe.Layer(
                lambda key, x: (),
                lambda params, x, key: x if key is None else x * jax.random.uniform(key),
                name="noise",
            ),
            "noise",
        ),
    ],
)
def test_missing_key(key, layer, name):
    pipe = make([dense(), layer, dense()])
    variables = pipe.init(key, BATCH)
    with compilations() as count, pytest.raises(ValueError, match=rf"layer 1 \({name}\) draws random .*, but key=None"):
        pipe.value_and_grad(variables, BATCH)
    assert count() == 0
    pipe.apply(variables, BATCH)


def test_random_numbers_in_evaluation_too(key):
    pipe = make([dense(), nn.Dropout(0.5, deterministic=False), dense()])
    variables = pipe.init(key, BATCH)
    with pytest.raises(ValueError, match=r"Dropout draws random .* by an argument `deterministic` or `train`"):
        pipe.apply(variables, BATCH)


@pytest.mark.usefixtures("nothing_compiles")
class TestVariables:
    """Variables that aren't this pipeline's."""

    @pytest.mark.parametrize("bad", [None, 3, "key", np.zeros(3, np.float32)])
    def test_key(self, ready, bad):
        pipe, variables, _ = ready
        with pytest.raises(TypeError, match="no random key"):
            pipe.init(bad, BATCH)
        if bad is not None:
            with pytest.raises(TypeError, match="no random key"):
                pipe.value_and_grad(variables, BATCH, bad)

    def test_before_any_batch(self, ready):
        _, variables, _ = ready
        with pytest.raises(ValueError, match="has seen no batch yet"):
            make().layer_variables(variables)
        with pytest.raises(ValueError, match="balance='flops' follows from the batch's shapes"):
            _ = make(balance="flops").partition

    def test_wrong_containers(self, ready):
        pipe, variables, _ = ready
        with pytest.raises(TypeError, match="variables is a list"):
            pipe.apply([variables], BATCH)
        with pytest.raises(TypeError, match="variables is a single collection; pass them by collection"):
            pipe.apply(variables["params"], BATCH)
        with pytest.raises(TypeError, match=r"variables\['params'\] is a list"):
            pipe.apply({"params": [1]}, BATCH)
        with pytest.raises(ValueError, match="unknown collection 'cache'; expected"):
            pipe.apply(variables | {"cache": variables["params"]}, BATCH)
        with pytest.raises(TypeError, match="variables is a dict"):
            pipe.value_and_grad({}, BATCH)

    def test_another_pipelines(self, ready):
        _, variables, state = ready
        other = make(num_stages=4)
        for call in (other.apply, other.evaluate, other.value_and_grad):
            with pytest.raises(ValueError, match=r"laid out by another pipeline \(num_stages=2, here 4"):
                call(variables, BATCH)
        with pytest.raises(ValueError, match=r"laid out by another pipeline \(num_stages=2, here 4"):
            other.train_step(state, BATCH)

    def test_another_pipelines_of_as_many_stages(self, ready):
        _, variables, _ = ready
        other = make([dense() for _ in range(5)])
        with pytest.raises(ValueError, match=r"another pipeline \(its layers, balance or mesh differ\)"):
            other.apply(variables, BATCH)

    def test_apply_is_given_no_inputs(self, ready):
        # It was jaxlib's "__ne__(): incompatible function arguments", of a comparison with None.
        pipe, variables, _ = ready
        for wrong in ({"x": BATCH["inputs"]}, variables):
            with pytest.raises(ValueError, match=r"neither a training batch.* nor the bare inputs"):
                pipe.apply(variables, wrong)

    def test_variables_and_batch_are_swapped(self, ready):
        """A regression: pages of treedefs."""
        pipe, variables, _ = ready
        with pytest.raises(TypeError, match=r"variables\['inputs'\] is a ndarray, not laid out .*batch comes after"):
            pipe.apply(BATCH, variables)
        with pytest.raises(ValueError, match=r"it has batch\['params'\]\[.* besides"):
            pipe.value_and_grad(BATCH, variables)

    def test_another_shape(self, ready):
        pipe, variables, _ = ready
        bad = {"params": jax.tree.map(lambda a: np.zeros((*a.shape, 2), np.float32), variables["params"])}
        with pytest.raises(ValueError, match=r"variables\['params'\].* has the shape .* as at init"):
            pipe.apply(bad, BATCH)

    def test_state(self, ready):
        pipe, variables, _ = ready
        with pytest.raises(TypeError, match="state is a dict; make it with"):
            pipe.train_step(variables, BATCH)

    def test_transformation(self, ready, key):
        pipe, _, _ = ready
        with pytest.raises(TypeError, match="tx is a float; pass an optax transformation"):
            pipe.create_state(key, BATCH, 0.1)

    def test_trees_of_another_structure(self):
        pipe = make()
        tree = lambda: {"params": {"kernel": np.zeros((4, 4), np.float32), "bias": np.zeros(4, np.float32)}}
        trees = [tree() for _ in range(4)]
        pipe.from_layer_variables(trees, BATCH)
        with pytest.raises(ValueError, match="3 trees but 4 layers"):
            pipe.from_layer_variables(trees[:3])
        del trees[2]["params"]["bias"]
        with pytest.raises(ValueError, match=r"trees\[2\] \(Dense\)\['params'\].*lacks .*\['bias'\]"):
            pipe.from_layer_variables(trees)
        trees[2]["params"]["bias"] = np.zeros(5, np.float32)
        with pytest.raises(ValueError, match=r"trees\[2\] \(Dense\).*\['bias'\] has the shape \(5,\), not \(4,\)"):
            pipe.from_layer_variables(trees)
        trees[2] = {}
        with pytest.raises(ValueError, match=r"trees\[2\] \(Dense\) lacks the collection 'params'; got \[\]$"):
            pipe.from_layer_variables(trees)

    def test_a_tree_for_the_first_use_only_of_shared_parameters(self):
        shared = jpipe.Shared(dense())
        pipe = make([dense(), shared, dense(), shared])
        pipe.abstract_state(BATCH, optax.sgd(0.1))
        tree = {"params": {"kernel": np.zeros((4, 4), np.float32), "bias": np.zeros(4, np.float32)}}
        with pytest.raises(ValueError, match=r"trees\[3\] .* lacks .* layer 1: give it the same tree as trees\[1\]"):
            pipe.from_layer_variables([tree, tree, tree, {}])

    def test_variables_of_another_dtype(self, ready):
        pipe, variables, _ = ready
        bad = {"params": jax.tree.map(lambda a: np.zeros(a.shape, np.float16), variables["params"])}
        with pytest.raises((TypeError, ValueError), match=r"variables\['params'\].*float16"):
            pipe.value_and_grad(bad, BATCH)


def test_per_layer_outside_of_a_pipeline():
    with pytest.raises(
        TypeError, match=r"jpipe\.per_layer takes the parameters of a jpipe\.Pipeline, not a dict; put it outermost"
    ):
        jpipe.per_layer(optax.sgd(0.1)).init({"w": np.ones(3, np.float32)})


def test_arrays_that_were_donated():
    """A donated array that reaches a warm jitted function crashes the process."""
    pipe = make()
    state = pipe.create_state(jax.random.key(0), BATCH, optax.sgd(0.1))
    after, _ = pipe.train_step(state, BATCH)
    pipe.apply(after.variables, BATCH)
    for use in (pipe.apply, pipe.evaluate, pipe.value_and_grad):
        with pytest.raises(
            ValueError, match=r"variables: .* donated to an earlier train_step, .*jax\.tree\.map\(jnp\.copy"
        ):
            use(state.variables, BATCH)
    with pytest.raises(ValueError, match=r"variables: .* donated"):
        pipe.layer_variables(state.variables)


@pytest.mark.parametrize("place", [lambda v: v, jax.device_get], ids=["devices", "host"])
def test_variables_given_to_create_state_outlive_its_steps(ready, key, place):
    """A regression: the first step donated them, and with them what the user held."""
    pipe, variables, state = ready
    mine = place(pipe.from_layer_variables(pipe.layer_variables(variables)))
    before = jax.device_get(mine)
    kept = jax.tree.map(jnp.copy, state.variables)  # as the error says
    started = pipe.create_state(key, BATCH, optax.sgd(0.1), mine)
    sharded = jax.tree.map(lambda leaf: leaf.sharding, (started.variables, state.variables))
    assert sharded[0] == sharded[1]
    pipe.train_step(started, BATCH)
    assert_equal(mine, before)
    assert_equal(kept, before)


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(1e-2, mask=lambda tree: jax.tree.map(lambda a: a.ndim > 1, tree)),
        optax.adafactor(1e-2),
        optax.multi_transform({"a": optax.sgd(0.1)}, lambda tree: jax.tree.map(lambda _: "a", tree)),
    ],
    ids=["mask", "adafactor", "multi_transform"],
)
def test_optimizers_that_tell_parameters_apart(tx):
    pipe = make()
    with pytest.raises(ValueError, match=r"tx tells parameters apart .* wrap that part of it in jpipe\.per_layer"):
        pipe.create_state(jax.random.key(0), BATCH, tx)
    pipe.create_state(jax.random.key(0), BATCH, jpipe.per_layer(tx))


def test_forward_only():
    pipe = make()
    variables = pipe.init(jax.random.key(0), BATCH)
    with pytest.raises(TypeError, match=r"pipelines can't be differentiated; use grads of pipe\.value_and_grad"):
        jax.grad(pipe.evaluate)(variables, BATCH)


def test_a_loss_that_raises():
    pipe = make(loss=lambda y, batch: jnp.mean(y - batch["labels"]))
    with pytest.raises(ValueError, match=r"loss_fn\(outputs, batch\) raised KeyError: 'labels'; it was called with"):
        pipe.init(jax.random.key(0), BATCH)


def test_inputs_that_are_nothing():
    pipe = make(inputs=lambda batch: None)
    with pytest.raises(ValueError, match=r"inputs returned None for the batch .*, which holds no arrays"):
        pipe.init(jax.random.key(0), BATCH)


def test_inputs_of_another_dtype():
    """The first layer may take them; a later one that then differs from those that it was like is an error."""
    other = jax.tree.map(lambda a: a.astype(np.int32), BATCH)
    pipe = make()
    variables = pipe.init(jax.random.key(0), BATCH)
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_allclose(pipe.apply(variables, other), pipe.apply(variables, jax.tree.map(np.float32, other)))
    pipe = make([lambda x: x, nn.Dense(4), nn.Dense(4), nn.Dense(4)])
    variables = pipe.init(jax.random.key(0), BATCH)
    message = r"layer 1 .* takes int32\[.*\] from this batch but took float32"
    with jax.numpy_dtype_promotion("standard"), pytest.raises(ValueError, match=message):
        pipe.apply(variables, other)


def test_a_state_in_place_of_variables():
    pipe = make()
    state = pipe.create_state(jax.random.key(0), BATCH, optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"variables is a TrainState; pass state\.variables"):
        pipe.apply(state, BATCH)


class Drifting(nn.Module):
    """Keeps a value of another type than at first."""

    dtype: jnp.dtype
    shape: tuple = ()

    @nn.compact
    def __call__(self, x):
        kept = self.variable("kept", "value", lambda: jnp.zeros((), jnp.float32))
        if not self.is_initializing():
            kept.value = jnp.zeros(self.shape, self.dtype)
        return x


@pytest.mark.parametrize("layer", [Drifting(jnp.int32), Drifting(jnp.float32, (2,))])
def test_state_that_changes_its_type(layer):
    pipe = jpipe.Pipeline([nn.Dense(4), layer], lambda y, _: jnp.mean(y), num_stages=1, num_microbatches=1)
    with pytest.raises(ValueError, match=r"layer 1 \(Drifting\) changes the type of its collection 'kept' in training"):
        pipe.init(jax.random.key(0), np.ones((2, 4), np.float32))


def test_outputs_that_differ_in_evaluation():
    def auxiliary(x, train):
        return (x, x) if train else x

    layers = [nn.Dense(4), auxiliary, lambda *x: x[0]]
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=1, num_microbatches=1)
    x = np.ones((2, 4), np.float32)
    variables = pipe.init(jax.random.key(0), x)
    pipe.value_and_grad(variables, x)
    with pytest.raises(
        ValueError, match=r"auxiliary gives float32\[2,4\] in evaluation, not \(float32\[2,4\], float32"
    ):
        pipe.apply(variables, x)


def test_evaluation_of_bare_inputs(ready):
    pipe, variables, _ = ready
    with pytest.raises(ValueError, match="batch"):
        pipe.evaluate(variables, BATCH["inputs"])


def test_a_partition_as_balance():
    with pytest.raises(TypeError, match=r"pass its layer counts: balance=partition\.counts"):
        cuts = jpipe.partition([1, 1], 2)
        jpipe.Pipeline([nn.Dense(4)] * 2, jnp.mean, num_stages=2, num_microbatches=1, balance=cuts)


@pytest.mark.usefixtures("nothing_compiles")
def test_other_things_in_place_of_variables(ready):
    pipe, variables, _ = ready
    with pytest.raises(TypeError, match=r"variables is a single collection; pass them by collection"):
        pipe.value_and_grad(variables["params"], BATCH)
    with pytest.raises(TypeError, match=r"variables is a ndarray; pass what pipe\.init returned"):
        pipe.apply(BATCH["inputs"], variables)
    with pytest.raises(TypeError, match=r"variables is a list; lay out trees of layers by pipe\.from_layer_variables"):
        pipe.apply([{}], BATCH)
    with pytest.raises(TypeError, match=r"trees is a NoneType; pass a list"):
        pipe.from_layer_variables(None)
    with pytest.raises(TypeError, match=r"trees\[0\]: .* has its variables in a dict by collection.*, not None"):
        pipe.from_layer_variables([None] * 4)


def test_inputs_that_are_not_there(key):
    pipe = jpipe.Pipeline([nn.Dense(4)], jnp.mean, num_stages=1, num_microbatches=1, inputs=lambda batch: batch["x"])
    with pytest.raises(ValueError, match=r"inputs raised KeyError\('x'\) for the batch {'inputs': "):
        pipe.init(key, BATCH)


def test_a_transformation_that_was_not_called():
    with pytest.raises(TypeError, match=r"tx is a function; pass an optax transformation, such as"):
        jpipe.per_layer(optax.adamw)


# --- saving and copying -----------------------------------------------------------------------------------------------


def test_variables_and_states_are_saved_layer_by_layer(ready):
    """A regression: "cannot pickle 'Device' object", and "can not serialize 'StageTree' object"."""
    pipe, variables, state = ready
    message = r"save tree = jax\.device_get\(pipe\.model_variables\(variables\)\), and load it by pipe\.from_model"
    for save in (pickle.dumps, serialization.to_bytes, serialization.to_state_dict):
        for what in (variables, state):
            with pytest.raises(TypeError, match=message):
                save(what)
    trees = pickle.loads(pickle.dumps(jax.device_get(pipe.layer_variables(variables))))
    assert_equal(pipe.from_layer_variables(trees), variables)
    for duplicate in (copy.copy, copy.deepcopy):
        assert_equal(duplicate(variables), variables)
        pipe.evaluate(duplicate(variables), BATCH)


def scale_init(key, x):
    return jnp.ones(())


def scale(a, x):
    return a * x


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_copies_of_a_pipeline(duplicate):
    """A regression: `init` of a copy worked, then "this pipeline has seen no batch yet"."""
    pipe = make([jpipe.Layer(scale_init, scale)] * 2, remat="none")
    variables = pipe.init(jax.random.key(0), BATCH)
    other = duplicate(pipe)
    (loss, _), _ = other.value_and_grad(other.init(jax.random.key(0), BATCH), BATCH)
    assert_equal(other.value_and_grad(variables, BATCH)[0][0], loss)
    assert repr(other) == repr(pipe)


def test_a_copy_of_modules_on_a_mesh(make_mesh):
    pipe = make([nn.Dense(4), lambda rngs: nnx.Linear(4, 4, rngs=rngs)], mesh=make_mesh((2, 2), ("stage", "data")))
    other = copy.deepcopy(pipe)
    variables = other.init(jax.random.key(0), BATCH)
    assert_equal(other.evaluate(variables, BATCH), pipe.evaluate(variables, BATCH))


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize(
    ("column", "message"),
    [
        (np.asarray(["a"] * 8), r"batch\['column'\] has the dtype <U1, but a batch holds numbers only; leave it out"),
        (np.asarray([None] * 8), r"batch\['column'\] has the dtype object"),
        (np.zeros(8, "datetime64[s]"), r"batch\['column'\] has the dtype datetime64"),
        (
            jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8)),
            r"batch\['column'\] has random keys, key<fry>; pass jax\.random\.key_data\(keys\)",
        ),
    ],
)
def test_columns_that_are_no_numbers(key, column, message):
    """A regression: raw errors that didn't name the leaf."""
    with pytest.raises(TypeError, match=message):
        make().init(key, BATCH | {"column": column})


@pytest.mark.usefixtures("nothing_compiles")
class TestShapes:
    """Batches of other shapes than at init."""

    def test_another_width(self, ready):
        """A regression: "make a new pipeline for it", which is the wrong remedy."""
        pipe, variables, _ = ready
        message = r"layer 0 \(Dense\) takes float32\[4,6\] from this batch but took float32\[4,4\] at init, .*features"
        with pytest.raises(ValueError, match=message):
            pipe.apply(variables, np.ones((8, 6), np.float32))

    def test_one_example(self, ready):
        """A regression, as above."""
        pipe, variables, _ = ready
        with pytest.raises(ValueError, match=r"batch has the shape \(4,\), that of one example at init; stack"):
            pipe.apply(variables, np.ones(4, np.float32))
        one = {"inputs": np.ones(4, np.float32), "targets": np.ones(4, np.float32)}
        for call in (pipe.apply, pipe.evaluate, pipe.value_and_grad):
            with pytest.raises(ValueError, match=r"batch\['inputs'\] has the shape \(4,\), that of one example"):
                call(variables, one)

    def test_targets(self, ready):
        """A regression: a raw broadcasting error that didn't mention loss_fn."""
        pipe, variables, state = ready
        batch = BATCH | {"targets": np.zeros((8, 3), np.float32)}
        message = r"loss_fn\(outputs, batch\) raised .*'targets': float32\[4,3\]"
        with pytest.raises(ValueError, match=message):
            pipe.value_and_grad(variables, batch)
        with pytest.raises(ValueError, match=message):
            pipe.evaluate(variables, batch)
        with pytest.raises(ValueError, match=message):
            pipe.train_step(state, batch)


def test_targets_that_apply_does_not_look_at(ready):
    pipe, variables, _ = ready
    other = BATCH | {"targets": np.zeros((8, 3), np.float32)}
    assert_equal(pipe.apply(variables, other), pipe.apply(variables, BATCH))


@struct.dataclass
class StructBatch:
    inputs: jax.Array
    targets: jax.Array


def test_a_batch_that_does_not_say_what_its_inputs_are(key):
    """A regression: the first layer was given the whole batch, and the remedy wasn't named."""
    loss = lambda y, batch: loss_fn(y, vars(batch))
    with pytest.raises(ValueError, match=r"the batch is a StructBatch, .* pass inputs=lambda batch: batch\.\.\.\. to"):
        make(loss=loss).init(key, StructBatch(**BATCH))
    make(loss=loss, inputs=lambda batch: batch.inputs).init(key, StructBatch(**BATCH))
    make().init(key, FrozenDict(BATCH))


@pytest.mark.parametrize("device", [pytest.param(0, marks=pytest.mark.slow), 7])
def test_a_batch_on_another_device(device):
    """A regression: "Received incompatible devices for jitted computation"."""
    pipe, there = make(), jax.devices()[device]
    variables = pipe.init(jax.device_put(jax.random.key(0), there), BATCH)
    batch, key = jax.device_put((BATCH, jax.random.key(1)), there)
    assert_equal(pipe.apply(variables, batch), pipe.apply(variables, BATCH))
    assert_equal(pipe.evaluate(variables, batch), pipe.evaluate(variables, BATCH))
    assert_equal(pipe.value_and_grad(variables, batch, key)[0], pipe.value_and_grad(variables, BATCH)[0])
    state = pipe.create_state(key, batch, optax.sgd(0.1))
    pipe.train_step(state, batch)


# --- layers, policies and losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        jax.checkpoint_policies.save_only_these_names,
        jax.checkpoint_policies.save_any_names_but_these,
        jax.checkpoint_policies.save_and_offload_only_these_names,
        jax.checkpoint_policies.save_from_both_policies,
        lambda *names, **others: lambda *_, **__: True,
    ],
)
@pytest.mark.usefixtures("nothing_compiles")
def test_policies_that_were_not_called(key, policy):
    """A regression: a raw TypeError in the first step, after `init` had passed."""
    with pytest.raises(TypeError, match=r"remat=.* is no jax\.checkpoint policy: it gave .*makes policies, call it"):
        make(remat=policy)


def test_policies():
    for name in ("everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable"):
        make(remat=getattr(jax.checkpoint_policies, name))
    make(remat=jax.checkpoint_policies.save_only_these_names("a"))
    make(remat=lambda primitive, *_, **__: primitive.name == "dot_general")


class Caches(nn.Module):
    @nn.compact
    def __call__(self, x):
        cache = self.variable("cache", "count", lambda: jnp.zeros((), jnp.float32))
        cache.value = cache.value + 1
        return x


def test_state_that_is_written_in_evaluation(key):
    """A regression: a raw error of Flax that named no layer."""
    pipe = make([dense(), Caches()])
    variables = pipe.init(key, BATCH)
    with pytest.raises(ValueError, match=r"Caches writes state in evaluation; .*training(?s:.)*collection \"cache\""):
        pipe.evaluate(variables, BATCH)


def test_layer_variables_that_are_traced(ready):
    """A regression: a raw TracerArrayConversionError."""
    pipe, variables, _ = ready
    trees = pipe.layer_variables(variables)
    with pytest.raises(TypeError, match=r"trees\[0\]\['params'\]\['bias'\] is being traced; .* outside of jax\.jit"):
        jax.jit(pipe.from_layer_variables)(trees)


@pytest.mark.parametrize("ordered", [False, True])
def test_callbacks_that_are_side_effects(key, ordered):
    """A regression: raw errors of differentiation that named no layer."""

    def tells(x):
        io_callback(lambda _: None, None, x, ordered=ordered)
        return x

    with pytest.raises(ValueError, match=r"layer 1 \(tells\) calls back into Python .*; use jax\.debug\.callback"):
        make([dense(), tells, dense()]).init(key, BATCH)


def test_a_layer_that_can_not_be_differentiated_is_named(key):
    def call(x):
        return jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    pipe = make([dense(), call, dense()])
    variables = pipe.init(key, BATCH)
    with pytest.raises(ValueError, match="Pure callbacks do not support JVP") as info:
        pipe.value_and_grad(variables, BATCH)
    assert "The layer call raised this while it was differentiated." in info.value.__notes__


def test_gradients_of_gradients(ready):
    """A regression: a raw error about while loops."""
    pipe, variables, _ = ready
    message = r"pipelines can't be differentiated; use grads of pipe\.value_and_grad"
    with pytest.raises(TypeError, match=message):
        jax.grad(lambda v: pipe.value_and_grad(v, BATCH)[0][0])(variables)


def accuracy(y, batch):
    return jnp.mean((jnp.argmax(y, -1) == jnp.argmax(batch["targets"], -1)).astype(jnp.float32))


def scanned_mask(y, batch):
    def add(total, row):
        return (total[0] + jnp.sum(row[0]), total[1] + jnp.sum(row[1])), None

    zeros = (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))
    return jax.lax.scan(add, zeros, (y, batch["targets"]))[0]


@pytest.mark.parametrize(
    ("weight", "refused"),
    [
        (lambda y, b: (jnp.sum(y), accuracy(y, b)), True),
        (lambda y, b: (jnp.sum(y), jax.lax.stop_gradient(jnp.sum(y > 0))), True),
        (lambda y, b: (jnp.sum(y), jnp.sum(b["targets"] > 0)), False),
        (lambda y, b: (jnp.sum(y), y.shape[0]), False),
        (scanned_mask, False),
        (lambda y, b: jnp.mean(y), False),
    ],
)
def test_a_metric_in_place_of_a_weight(key, weight, refused):
    """A regression: (loss, accuracy) was taken for (loss_sum, weight_sum), and came out as infinite with a warning."""
    pipe = make(loss=weight)
    if not refused:
        pipe.evaluate(pipe.init(key, BATCH), BATCH)
        return
    words = r"loss_fn <lambda> returned a weight_sum that depends on the model's outputs.* return the loss alone"
    with pytest.raises(ValueError, match=words):
        pipe.init(key, BATCH)


def test_more_stages_than_anybody_has_are_refused_before_a_schedule_is_made():
    """It took minutes, and all of the memory."""
    with pytest.raises(ValueError, match=r"num_stages=1000000000 times num_chunks=1 is more than the 2 layers"):
        jpipe.Pipeline([dense(), dense()], lambda y, b: jnp.mean(y), num_stages=10**9, num_microbatches=4)


# --- optimisers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tx", "needs"),
    [
        (optax.lbfgs(), "'grad' and 'value_fn'"),
        (optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True), "grad_fn must be provided"),
    ],
    ids=["lbfgs", "sam"],
)
@pytest.mark.usefixtures("nothing_compiles")
def test_transformations_that_compute_the_loss_again(ready, key, tx, needs):
    """A regression: raw TypeErrors in the first step."""
    pipe, _, _ = ready
    with pytest.raises(TypeError, match=rf"tx\.update raised .*{needs}.*value=loss, and nothing that computes"):
        pipe.create_state(key, BATCH, tx)


def test_per_layer_with_a_key_in_its_state(ready, key):
    """A regression: "data type 'key<fry>' not understood"."""
    pipe, _, _ = ready
    noisy = optax.chain(optax.add_noise(0.1, 0.5, key=0), optax.sgd(0.1))
    message = r"jpipe\.per_layer: state\[0\]\[0\]\.rng_key is a random key, .*; keep it outside"
    with pytest.raises(TypeError, match=message):
        pipe.create_state(key, BATCH, jpipe.per_layer(noisy))
    state = pipe.create_state(key, BATCH, noisy)
    with jax.numpy_dtype_promotion("standard"):  # optax itself mixes dtypes
        pipe.train_step(state, BATCH)
