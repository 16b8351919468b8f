"""Bad input: a clear error, before anything is compiled, that names the offender, its value and the remedy."""

import copy
import pickle
import re
import traceback
from types import SimpleNamespace

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
from cases import assert_equal, compilations
from small_pipeline import dense, loss_fn, make


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


BATCH = {"inputs": ones(8, 4), "targets": np.zeros((8, 4), np.float32)}


def start(layers=None, batch=BATCH, **options):
    """Initialises a pipeline."""
    return make(layers, **options).init(jax.random.key(0), batch)


def refuses(error, words, call, *arguments):
    with pytest.raises(error, match=words):
        call(*arguments)


@pytest.fixture(scope="module")
def ready():
    """A pipeline, its variables, its state, and a key."""
    pipe, key = make(), jax.random.key(0)
    made = {"variables": pipe.init(key, BATCH), "state": pipe.create_state(key, BATCH, optax.sgd(0.1))}
    return SimpleNamespace(pipe=pipe, key=key, **made)


@pytest.fixture
def nothing_compiles(ready):
    """Checks that the test compiled nothing."""
    with compilations() as count:
        yield
        assert count() == 0, "the error came after something was compiled"


def mesh_of(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes))


OF_TWO, MADE_FOR = jpipe.make_schedule("1f1b", num_stages=2, num_microbatches=2), "but the schedule '1f1b' was made for"
NO_POLICY = r"remat=.* is no jax\.checkpoint policy: it gave .*makes policies, call it"
MAKERS = [
    jax.checkpoint_policies.save_only_these_names,
    jax.checkpoint_policies.save_and_offload_only_these_names,
    jax.checkpoint_policies.save_from_both_policies,
    lambda *names, **others: lambda *_, **__: True,
]


@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_stages": 5}, ValueError, "num_stages=5 .* 4 layers; use 1 to 4"),
        ({"num_stages": 2, "num_chunks": 3, "schedule": "interleaved"}, ValueError, "num_chunks=3 .* 4 layers; use"),
        ({"layers": [dense() for _ in range(9)], "num_stages": 9}, ValueError, "num_stages=9 .* 8 cpu devices"),
        # It took minutes, and all of the memory.
        ({"num_stages": 10**9}, ValueError, "num_stages=1000000000 is more than the 4 layers"),
        ({"num_chunks": 2, "schedule": "1f1b"}, ValueError, "'1f1b'.*(?s:.)*num_chunks=2|num_chunks=2(?s:.)*'1f1b'"),
        ({"schedule": "2f2b"}, ValueError, "schedule='2f2b' is unknown.*'naive', 'gpipe', '1f1b', 'interleaved'"),
        ({"schedule": 1}, TypeError, "schedule=1 must be a name or a jpipe.Schedule"),
        ({"schedule": "forward"}, ValueError, "no backward actions"),
        ({"remat": "some"}, ValueError, r"remat='some' is unknown.*'full', 'layer', 'none', 'stage'"),
        ({"remat": 1}, TypeError, "remat=1 is neither a name"),
        ({"balance": "equal"}, ValueError, r"balance='equal' is unknown.*'flops', 'time', 'size', 'even'"),
        ({"balance": [1, 1, 2]}, ValueError, r"balance=\[1, 1, 2\] has 3 layer counts; .* 2 of them, such as \[2, 2\]"),
        ({"balance": [1, 2]}, ValueError, r"balance=\[1, 2\] sums to 3, not 4 layers; .* such as \[2, 2\]"),
        ({"balance": [0, 4]}, ValueError, r"balance=\[0, 4\] has a stage without layers; .* such as \[2, 2\]"),
        ({"balance": [1.0, 2.0]}, ValueError, "balance has 2 costs but there are 4 layers"),
        ({"balance": [1.0, 2.0, float("nan"), 1.0]}, ValueError, "nan"),
        ({"balance": 2}, TypeError, "balance=2 is neither"),
        ({"balance": jpipe.partition([1, 1], 2)}, TypeError, r"pass its layer counts: balance=partition\.counts"),
        ({"layers": []}, ValueError, "layers is empty"),
        ({"layers": 3}, TypeError, "layers is a int; pass a model that is one module"),
        ({"layers": [dense(), None]}, TypeError, r"layers\[1\] is a NoneType"),
        ({"layers": [dense(), lambda rngs: 3]}, TypeError, r"layers\[1\] takes rngs.* returned int"),
        # It named no layer.
        (
            {"layers": [dense(), lambda rngs: nnx.Linear(4, 4)]},
            TypeError,
            r"layers\[1\] .*'rngs'; .* lambda rngs: Block",
        ),
        ({"loss": 3}, TypeError, "loss_fn=3 is not callable"),
        ({"inputs": "inputs"}, TypeError, "inputs='inputs' is not callable"),
        ({"mesh": 4}, TypeError, "mesh is a int"),
        ({"mesh": mesh_of(data=2, model=2)}, ValueError, r"mesh has the axes \('data', 'model'\) but no axis 'stage'"),
        ({"mesh": mesh_of(stage=4)}, ValueError, "mesh has 4 devices along 'stage' but num_stages=2"),
        ({"schedule": OF_TWO, "num_stages": 3}, ValueError, f"num_stages=3, {MADE_FOR}"),
        ({"schedule": OF_TWO, "num_microbatches": 4}, ValueError, f"num_microbatches=4, {MADE_FOR}"),
        ({"schedule": OF_TWO, "num_chunks": 2}, ValueError, f"num_chunks=2, {MADE_FOR}"),
        # A raw TypeError in the first step, after `init` had passed: policies that weren't called.
        *(({"remat": policy}, TypeError, NO_POLICY) for policy in MAKERS),
    ],
)
def test_arguments_of_the_pipeline(options, error, message):
    refuses(error, message, lambda: make(**options))


# --- batches ----------------------------------------------------------------------------------------------------------


@struct.dataclass
class StructBatch:
    inputs: jax.Array
    targets: jax.Array


KEYS = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))


@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (BATCH | {"c": KEYS}, TypeError, r"batch\['c'\] has random keys, key<fry>; pass jax\.random\.key_data\(keys\)"),
        (ones(30, 4), ValueError, "size 30 is not divisible by num_microbatches=4; use 1, 2, 3, 5, 6, 10, 15 or 30"),
        ({"inputs": ones(0, 4)}, ValueError, "batch size 0"),
        ({"inputs": ones(8, 4), "targets": 3.0}, TypeError, r"batch\['targets'\] is a float"),
        (BATCH | {"targets": ones(4, 4)}, ValueError, r"batch\['inputs'\] has 8, batch\['targets'\] has 4"),
        ({"x": ones(8, 4)}, ValueError, r"the keys \['x'\] and no 'inputs'"),
        ((), ValueError, "the batch"),
        (None, ValueError, "the batch holds no arrays"),
        ("text", TypeError, "batch is a str, not an array"),
        # The first layer was given the whole batch.
        (StructBatch(**BATCH), ValueError, r"batch is a StructBatch, .* pass inputs=lambda batch: batch\.\.\.\. to"),
        # Raw errors that didn't name the leaf.
        (BATCH | {"c": np.asarray(["a"] * 8)}, TypeError, r"\['c'\] has the dtype <U1, .* numbers only; leave it out"),
        (BATCH | {"c": np.asarray([None] * 8)}, TypeError, r"batch\['c'\] has the dtype object"),
    ],
)
def test_batches(batch, error, message):
    refuses(error, message, lambda: start(batch=batch, num_microbatches=4))


def test_batches_of_other_containers():
    """Their inputs are known, or said."""
    loss = lambda y, batch: loss_fn(y, vars(batch))
    start(batch=StructBatch(**BATCH), loss=loss, inputs=lambda batch: batch.inputs)
    start(batch=FrozenDict(BATCH))


def test_micro_batch_not_divisible_by_the_data_axis(make_mesh):
    message = r"batch size 8 isn't divisible by num_microbatches=8 \* 2 .* multiple of 16"
    refuses(ValueError, message, lambda: start(mesh=make_mesh((2, 2), ("stage", "data")), num_microbatches=8))


ANOTHER = "batch has another structure than at init"


@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (jax.tree.map(lambda a: a[:5], BATCH), "batch size 5 is not divisible by num_microbatches=2; use 1 or 5"),
        ({"inputs": BATCH["inputs"]}, rf"{ANOTHER}: it lacks batch\['targets'\]"),
        (BATCH | {"mask": BATCH["inputs"]}, rf"{ANOTHER}: it has batch\['mask'\]"),
        (tuple(BATCH.values()), ANOTHER),
        # "make a new pipeline for it" was the wrong remedy.
        (BATCH | {"inputs": ones(8, 6)}, r"layer 0 \(Dense\) takes float32\[4,6\] .* but took float32\[4,4\] .*fea"),
        # A raw broadcasting error that didn't mention loss_fn.
        (BATCH | {"targets": ones(8, 3)}, r"loss_fn\(outputs, batch\) raised .*'targets': float32\[4,3\]"),
        ({"inputs": ones(4), "targets": ones(4)}, r"batch\['inputs'\] has the shape \(4,\), that of one example"),
    ],
)
def test_batches_that_are_others_than_at_init(ready, batch, message):
    refuses(ValueError, message, ready.pipe.value_and_grad, ready.variables, batch)
    refuses(ValueError, message, ready.pipe.train_step, ready.state, batch)


def test_a_batch_on_another_device():
    """A regression: "Received incompatible devices for jitted computation"."""
    pipe, there = make(), jax.devices()[7]
    variables = pipe.init(jax.device_put(jax.random.key(0), there), BATCH)
    batch, key = jax.device_put((BATCH, jax.random.key(1)), there)
    assert_equal(pipe.apply(variables, batch), pipe.apply(variables, BATCH))
    assert_equal(pipe.evaluate(variables, batch), pipe.evaluate(variables, BATCH))
    assert_equal(pipe.value_and_grad(variables, batch, key)[0], pipe.value_and_grad(variables, BATCH)[0])
    pipe.train_step(pipe.create_state(key, batch, optax.sgd(0.1)), batch)


# --- layers and losses ------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(self.width)(x)


class Untold(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5)(x)


class Masked(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        return nn.Dense(4)(x) * mask


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


def with_params(tree):
    return jpipe.Layer(lambda key, x: {"w": tree}, lambda params, x: x, name="scale")


def tells(x, ordered):
    io_callback(lambda _: None, None, x, ordered=ordered)
    return x


def beside(value):
    """Layers at whose boundary another value is."""
    return [lambda x: {"x": x, "other": value}, lambda tree: tree["x"]]


ARGUMENTS = r"Masked.*'mask'\. .* A layer before it can give a tuple.*jpipe\.reads"
CALLS_BACK = r"layer 1 \(<lambda>\) calls back into Python .*; use jax\.debug\.callback"
DRIFTS = r"layer 1 \(Drifting\) changes the type of its collection 'kept' in training"


def linear5(rngs):
    return nnx.Linear(5, 4, rngs=rngs)


@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([dense(), linear5], r"(?s)layer 1 \(Linear\).*layer 0 \(Dense\) takes .* gives float32\[4,4\]\n.*\[5,4\]"),
        ([linear5, dense()], r"(?s)layer 0 \(Linear\).*the batch.*float32\[4,4\].*\[5,4\]"),
        ([Untold(), dense()], r"layer 0 \(Untold\) raised .*Whether it trains, a layer is told by"),
        ([lambda x: (x, x), dense()], r"(?s)layer 1 \(Dense\).*layer 0 .* gives \(float32\[4,4\], float32"),
        ([Masked(), dense()], ARGUMENTS),
        ([dense(), Masked()], ARGUMENTS),
        (beside("first"), r"(?s)layer 0.*str"),
        (beside(2.0), r"layer 0 .*float.*\['other'\]"),
        ([with_params(np.arange(4)), dense()], r"layer 0 \(scale\) has the parameter \['w'\] of dtype int"),
        ([with_params("none"), dense()], r"(?s)layer 0 \(scale\).*str"),
        ([dense(), Drifting(jnp.int32)], DRIFTS),
        ([dense(), Drifting(jnp.float32, (2,))], DRIFTS),
        # Raw errors of differentiation that named no layer.
        ([dense(), lambda x: tells(x, True), dense()], CALLS_BACK),
        ([dense(), lambda x: tells(x, False), dense()], CALLS_BACK),
    ],
)
def test_layers(layers, message):
    refuses((TypeError, ValueError), message, start, layers)


def test_layers_that_are_no_layers():
    bound = dense().bind({"params": {"kernel": ones(4, 4), "bias": ones(4)}})
    message = r"layers\[0\] \(Dense\) is a bound linen module; pass it unbound"
    refuses(TypeError, message, make, [bound, dense()])
    refuses(TypeError, r"jpipe\.Layer: init=None is not callable", jpipe.Layer, None, lambda params, x: x)
    refuses(TypeError, r"jpipe\.Layer: apply=3 is not callable", jpipe.Layer, lambda key, x: (), 3)
    table, shared = nn.Embed(16, 8), jpipe.Shared(jpipe.Layer(scale_init, scale))
    refuses(TypeError, r'jpipe\.Shared\(Embed.* or tied\.using\("attend"\)', make, [table, table.attend])
    refuses(TypeError, r"pass a function `apply\(params, x\)`", lambda: make([shared, shared.using("attend")]))


@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize("layers", [Masked(), [Masked(), dense()]])
def test_a_dict_is_one_argument(layers):
    """As Hugging Face's batches are passed; a regression: it said nothing of keywords."""
    model = lambda **options: jax.eval_shape(make(layers, num_stages=1, **options).init, jax.random.key(0), BATCH)
    by_keyword = r"a dict is one argument; .* keyword: inputs=lambda batch: jpipe\.Arguments\(\*\*batch\)"
    refuses(ValueError, by_keyword, lambda: model(inputs=lambda batch: batch))
    model(inputs=lambda batch: jpipe.Arguments(x=batch["inputs"], mask=batch["targets"]))


@pytest.mark.usefixtures("nothing_compiles")
def test_the_layer_at_fault_is_named_with_its_line():
    """A regression: "layer 1 can't take what layer 0 gives", where its own Dense was too wide, under 65 lines."""
    with pytest.raises(ValueError) as info:
        make([dense(), Residual(6), dense()]).init(jax.random.key(0), BATCH)
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


@pytest.mark.usefixtures("nothing_compiles")
def test_the_layer_that_changed_the_width_is_named():
    """However many layers before: here the next ones take any."""
    with pytest.raises(ValueError) as info:
        start([dense(), dense(6), jnp.tanh, jnp.sin, lambda rngs: nnx.Linear(4, 4, rngs=rngs)])
    assert str(info.value).split("\n")[1:] == [
        "  layer 1 (Dense) takes float32[4,4], gives float32[4,6]",
        "  layer 3 (sin) takes float32[4,6], gives float32[4,6]",
        "  layer 4 (Linear) has the parameters {'bias': float32[4], 'kernel': float32[4,4]}",
    ]


@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        ("loss", lambda y, b: y, r"loss_fn returned float32\[4,4\]; .* scalar"),
        ("loss", lambda y, b: (jnp.sum(y),) * 3, r"loss_fn returned \(float32\[\], float32.* a dict"),
        ("loss", lambda y, b: (jnp.sum(y), y), r"loss_fn returned \(float32\[\], float32\[4,4\]"),
        ("loss", lambda y, b: jnp.sum(y > 0), "loss of dtype int32"),
        ("loss", lambda y, b: None, "loss_fn returned None"),
        ("loss", lambda y, b: {"loss": jnp.sum(y)}, "loss_fn returned a loss as 'loss'"),
        ("loss", lambda y, b: y - b["labels"], r"loss_fn\(outputs, batch\) raised KeyError: 'labels'; it was called"),
        ("inputs", lambda batch: None, r"inputs returned None for the batch .*, which holds no arrays"),
        ("inputs", lambda batch: batch["x"], r"inputs raised KeyError\('x'\) for the batch {'inputs': "),
    ],
)
def test_losses_and_inputs(name, function, message):
    refuses(ValueError, message, lambda: start(**{name: function}))


class Caches(nn.Module):
    @nn.compact
    def __call__(self, x):
        cache = self.variable("cache", "count", lambda: jnp.zeros((), jnp.float32))
        cache.value = cache.value + 1
        return x


def auxiliary(x, train):
    return (x, x) if train else x


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            [nn.Dropout(0.5, deterministic=False), dense()],
            r"Dropout draws random .* argument `deterministic` or `train`",
        ),
        # A raw error of Flax that named no layer.
        ([dense(), Caches()], r"Caches writes state in evaluation; .*training(?s:.)*collection \"cache\""),
        ([dense(), auxiliary, lambda *x: x[0]], r"auxiliary gives float32\[4,4\] in evaluation, not \(float32\[4,4\]"),
    ],
)
def test_layers_in_evaluation(layers, message):
    pipe = make(layers)
    variables = pipe.init(jax.random.key(0), BATCH)
    refuses(ValueError, message, pipe.evaluate, variables, BATCH)


def test_a_layer_that_can_not_be_differentiated_is_named():
    def call(x):
        return jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    pipe = make([dense(), call, dense()])
    variables = pipe.init(jax.random.key(0), BATCH)
    with pytest.raises(ValueError, match="Pure callbacks do not support JVP") as info:
        pipe.value_and_grad(variables, BATCH)
    assert "The layer call raised this while it was differentiated." in info.value.__notes__


# --- variables, states and optimisers ---------------------------------------------------------------------------------


def of_another(stages, count=4):
    return make([dense() for _ in range(count)], num_stages=stages)


OTHER_STAGES = r"laid out by another pipeline \(num_stages=2, here 4"
NOT_DERIVED = r"pipelines can't be differentiated; use grads of pipe\.value_and_grad"
NO_BATCH = r"neither a training batch.* nor the bare inputs"
TREE = {"params": {"kernel": np.zeros((4, 4), np.float32), "bias": np.zeros(4, np.float32)}}


def as_if(ready, more, dtype=np.float32):
    """Variables of other shapes or types."""
    return {"params": jax.tree.map(lambda a: np.zeros((*a.shape, *more), dtype), ready.variables["params"])}


@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda r: r.pipe.init(np.zeros(3, np.float32), BATCH), TypeError, "no random key"),
        (lambda r: r.pipe.value_and_grad(r.variables, BATCH, 3), TypeError, "no random key"),
        (lambda r: r.pipe.apply([r.variables], BATCH), TypeError, "variables is a list"),
        (lambda r: r.pipe.apply(r.variables["params"], BATCH), TypeError, "single collection; pass them by collection"),
        (lambda r: r.pipe.apply({"params": [1]}, BATCH), TypeError, r"variables\['params'\] is a list"),
        (
            lambda r: r.pipe.apply(r.variables | {"cache": r.variables["params"]}, BATCH),
            ValueError,
            "'cache'; expected",
        ),
        (lambda r: r.pipe.value_and_grad({}, BATCH), TypeError, "variables is a dict"),
        (lambda r: r.pipe.apply(r.state, BATCH), TypeError, r"variables is a TrainState; pass state\.variables"),
        (lambda r: of_another(4).apply(r.variables, BATCH), ValueError, OTHER_STAGES),
        (lambda r: of_another(4).train_step(r.state, BATCH), ValueError, OTHER_STAGES),
        (lambda r: of_another(2, 5).apply(r.variables, BATCH), ValueError, r"layers, balance, mesh or dtypes"),
        # jaxlib's "__ne__(): incompatible function arguments", of a comparison with None, and pages of treedefs.
        (lambda r: r.pipe.apply(r.variables, {"x": BATCH["inputs"]}), ValueError, NO_BATCH),
        (lambda r: r.pipe.apply(r.variables, ones(8, 6)), ValueError, r"float32\[4,6\] from this batch.*features"),
        (lambda r: r.pipe.apply(r.variables, ones(4)), ValueError, r"shape \(4,\), that of one example at init; stack"),
        (lambda r: r.pipe.evaluate(r.variables, BATCH["inputs"]), ValueError, "batch"),
        (lambda r: r.pipe.apply(BATCH, r.variables), TypeError, r"\['inputs'\] is a ndarray, .*batch comes after"),
        (lambda r: r.pipe.apply(ones(8, 4), r.variables), TypeError, r"is a ndarray; pass what pipe\.init returned"),
        (lambda r: r.pipe.value_and_grad(BATCH, r.variables), ValueError, r"it is batch\['params'\]\[.* not batch"),
        (
            lambda r: r.pipe.apply(as_if(r, (9,)), BATCH),
            ValueError,
            r"variables\['params'\].* has the shape .* as at init",
        ),
        (lambda r: r.pipe.apply(as_if(r, (), np.float16), BATCH), ValueError, r"variables\['params'\].*float16"),
        # Raw errors of tracers and while loops.
        (lambda r: jax.jit(r.pipe.from_layer_variables)([TREE] * 4), TypeError, r"trees\[0\].* outside of jax\.jit"),
        (lambda r: jax.grad(r.pipe.evaluate)(r.variables, BATCH), TypeError, NOT_DERIVED),
    ],
)
def test_variables_and_states(ready, call, error, message):
    refuses(error, message, call, ready)


KERNEL, SHARED = {"kernel": TREE["params"]["kernel"]}, jpipe.Shared(dense())


@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize(
    ("trees", "error", "message"),
    [
        (None, TypeError, r"trees is a NoneType; pass a list"),
        ([None] * 4, TypeError, r"trees\[0\]: .* has its variables in a dict by collection.*, not None"),
        ([TREE] * 3, ValueError, "3 trees but 4 layers"),
        ([TREE, TREE, {"params": KERNEL}, TREE], ValueError, r"trees\[2\] \(Dense\)\['params'\].*lacks .*\['bias'\]"),
        (
            [TREE, TREE, {"params": KERNEL | {"bias": ones(5)}}, TREE],
            ValueError,
            r"trees\[2\] \(Dense\).*\['bias'\] has the shape \(5,\), not \(4,\)",
        ),
        ([TREE, TREE, {}, TREE], ValueError, r"trees\[2\] \(Dense\) lacks the collection 'params'; got \[\]$"),
        ([TREE, TREE, TREE, {}], ValueError, r"trees\[3\] .* lacks .* layer 1: give it the same tree as trees\[1\]"),
    ],
)
def test_trees_of_layers(trees, error, message):
    pipe = make([dense(), SHARED, dense(), SHARED] if "layer 1" in message else None)
    pipe.abstract_state(BATCH, optax.sgd(0.1))
    refuses(error, message, pipe.from_layer_variables, trees)


LAYERWISE = r"save tree = jax\.device_get\(pipe\.model_variables\(variables\)\), and load it by pipe\.from_model"
# What `tests/end_to_end/test_remedies.py` has of optimisers isn't here.
AGAIN = r"tx\.update raised .*{}.*value=loss, and nothing that computes"


@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize(
    ("tx", "message"),
    [
        # Raw TypeErrors in the first step.
        (optax.lbfgs(), "'grad' and 'value_fn'"),
        (optax.contrib.sam(*[optax.sgd(0.1)] * 2, opaque_mode=True), "grad_fn must be provided"),
    ],
)
def test_transformations(ready, tx, message):
    refuses(TypeError, AGAIN.format(message), ready.pipe.create_state, ready.key, BATCH, tx)


def test_per_layer_of_other_things():
    message = r"jpipe\.per_layer takes the parameters of a jpipe\.Pipeline, not a dict; put it outermost"
    refuses(TypeError, message, jpipe.per_layer(optax.sgd(0.1)).init, {"w": ones(3)})
    refuses(TypeError, r"tx is a function; pass an optax transformation, such as", jpipe.per_layer, optax.adamw)


def test_arrays_that_were_donated():
    """A donated array that reaches a warm jitted function crashes the process."""
    pipe = make()
    state = pipe.create_state(jax.random.key(0), BATCH, optax.sgd(0.1))
    after, _ = pipe.train_step(state, BATCH)
    pipe.apply(after.variables, BATCH)
    message = r"variables: .* donated to an earlier train_step, .*jax\.tree\.map\(jnp\.copy"
    for use in (pipe.apply, pipe.evaluate, pipe.value_and_grad):
        refuses(ValueError, message, use, state.variables, BATCH)
    refuses(ValueError, r"variables: .* donated", pipe.layer_variables, state.variables)


@pytest.mark.parametrize("place", [lambda v: v, jax.device_get], ids=["devices", "host"])
def test_variables_given_to_create_state_outlive_its_steps(ready, place):
    """A regression: the first step donated them, and with them what the user held."""
    pipe, state = ready.pipe, ready.state
    mine = place(pipe.from_layer_variables(pipe.layer_variables(ready.variables)))
    before = jax.device_get(mine)
    kept = jax.tree.map(jnp.copy, state.variables)  # as the error says
    started = pipe.create_state(ready.key, BATCH, optax.sgd(0.1), mine)
    sharded = jax.tree.map(lambda leaf: leaf.sharding, (started.variables, state.variables))
    assert sharded[0] == sharded[1]
    pipe.train_step(started, BATCH)
    assert_equal(mine, before)
    assert_equal(kept, before)


# --- saving and copying -----------------------------------------------------------------------------------------------


def test_variables_and_states_are_saved_layer_by_layer(ready):
    """A regression: "cannot pickle 'Device' object", and "can not serialize 'StageTree' object"."""
    pipe, variables = ready.pipe, ready.variables
    for save in (pickle.dumps, serialization.to_bytes, serialization.to_state_dict):
        for what in (variables, ready.state):
            refuses(TypeError, LAYERWISE, save, what)
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
