"""Meshes with other axes than `stage`, with Auto and Explicit axes: the gradients are the sequential model's."""

import contextlib
import copy
import functools
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jpipe
import quick
from cases import (
    VOCABULARY,
    WIDTH,
    assert_close,
    check_step,
    compilations,
    make_model,
    model,
    pipeline,
    tokens,
    weighted_cross_entropy,
)
from split_model import split_model
from timed import Worker

SLOW = pytest.mark.slow
SIZES = {"num_stages": 2, "num_microbatches": 2, "balance": "even"}
STAGE_DATA, STAGE_MODEL = ((2, 2), ("stage", "data")), ((2, 2), ("stage", "model"))
KEY = jax.random.key(0)


def random(*shape, dtype=np.float32):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def ones(*shape):
    return np.ones(shape, np.float32)


def square(y, _):
    return jnp.mean(jnp.square(y))


def small(*layers, **options):
    """A pipeline of two stages."""
    return jpipe.Pipeline(list(layers), square, **SIZES | options)


def split_dense(width, *names):
    return nn.Dense(width, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), names))


def names_of(tree):
    """The axes of the mesh that leaves are split over."""
    return {name for leaf in jax.tree.leaves(tree) for name in jax.tree.leaves(tuple(leaf.sharding.spec))}


# --- the sequential model ---------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """A sum over experts, whose weights metadata splits over `expert`, and at rest over `dp_replicate` too."""

    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.normal(0.3), ("expert", None, "dp_replicate"))
        w = self.param("w", init, (4, WIDTH, WIDTH), x.dtype)
        return x + jnp.einsum("bsi,eij->bsj", jnp.tanh(x), w)


def between_ends(*layers):
    """A model of these layers in float64."""
    embed = nn.Embed(VOCABULARY, WIDTH, param_dtype=jnp.float64, dtype=jnp.float64)
    head = nn.Dense(VOCABULARY, param_dtype=jnp.float64)
    return make_model([embed, *layers, head], weighted_cross_entropy, tokens())


@functools.cache
def truth_of(kind):
    with jax.enable_x64(True):
        made = {"split": split_model, "experts": lambda: between_ends(Experts(), Experts(), Experts())}
        return made.get(kind, lambda: model(kind))()


def check(kind, mesh, *, set_mesh=False, **options):
    """Loss, every gradient, outputs and evaluation are the sequential model's."""
    with jax.enable_x64(True):
        truth = truth_of(kind)
        loss, *_ = truth.truth  # before the mesh is set, which is what calling jax.set_mesh does
        with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
            pipe = pipeline(truth, "1f1b", mesh.shape["stage"], 3, mesh=mesh, **options)
            variables, _ = check_step(pipe, truth)
            evaluated = pipe.evaluate(variables, truth.batch)
        assert_close(evaluated, loss, "evaluation")
        return pipe, variables


@pytest.mark.parametrize(
    ("kind", "axes", "explicit", "set_mesh", "remat"),
    [
        pytest.param("linen", {"stage": 2, "data": 2}, False, False, "layer", marks=SLOW),
        ("mixed", {"stage": 2, "data": 2}, True, True, "none"),
        pytest.param("mixed", {"stage": 4, "data": 2}, False, True, "stage", marks=SLOW),
        pytest.param("alternating", {"stage": 4, "data": 2}, False, False, "full", marks=SLOW),
        pytest.param("plain", {"stage": 2, "fsdp": 4}, True, False, "none", marks=SLOW),
        ("plain", {"data": 2, "stage": 2}, False, False, "layer"),  # which need not be the first
        pytest.param("plain", {"stage": 3}, True, False, "layer", marks=SLOW),  # as jax.make_mesh has it by default
    ],
)
def test_data_axes(make_mesh, kind, axes, explicit, set_mesh, remat):
    mesh = make_mesh(tuple(axes.values()), tuple(axes), explicit=explicit)
    check(kind, mesh, set_mesh=set_mesh, remat=remat)


@pytest.mark.parametrize(("explicit", "set_mesh"), [(False, False), pytest.param(True, True, marks=SLOW)])
def test_model_axis(make_mesh, explicit, set_mesh):
    mesh = make_mesh((2, 2, 2), ("stage", "data", "model"), explicit=explicit)
    _, variables = check("split", mesh, set_mesh=set_mesh, balance=[3, 4])
    split = [leaf for leaf in jax.tree.leaves(variables["params"]) if "model" in names_of(leaf)]
    assert len(split) == 3, "two kernels and a bias"
    for leaf in split:
        (axis,) = [i for i, name in enumerate(leaf.sharding.spec) if name == "model"]
        assert leaf.shape[axis] == 2 * WIDTH, "each along the hidden features"


@pytest.mark.parametrize("gather", ["step", "use"])
def test_batch_axes(make_mesh, gather):
    """Values are the sequential model's, and `dp_replicate` is a data axis: parts of batches, ZeRO-1, gathered."""
    mesh, batch = make_mesh((2, 2, 2), ("stage", "dp_replicate", "expert")), truth_of("experts").batch
    options = {"batch_axes": ("dp_replicate",), "shard_over": "dp_replicate", "gather": gather, "balance": "even"}
    pipe, variables = check("experts", mesh, **options)
    assert names_of(variables) == {"stage", "dp_replicate", "expert"}
    with jax.enable_x64(True):
        for whole, leaf in zip(jax.tree.leaves(batch), jax.tree.leaves(pipe.place(batch)), strict=True):
            assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {len(whole) // 2}
    assert copy.copy(pipe).planner.request.splits == pipe.planner.request.splits


class Logical(nn.Module):
    """As `SplitBlock`, with names that only rules translate, of activations too."""

    @nn.compact
    def __call__(self, x):
        def dense(width, *names):
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
            return nn.Dense(width, param_dtype=jnp.float64, kernel_init=init)

        h = nn.with_logical_constraint(dense(2 * WIDTH, "embed", "mlp")(x), ("batch", None, "mlp"))
        return x + dense(WIDTH, "mlp", "embed")(nn.tanh(h))


def linear(rngs, names=None, **metadata):
    init = nnx.initializers.lecun_normal()
    init = nnx.with_partitioning(init, names, **metadata) if names else init
    return nnx.Linear(WIDTH, WIDTH, kernel_init=init, param_dtype=jnp.float64, rngs=rngs)


OF_BATCH, OF_WEIGHTS = ("batch", ("pod", "dp")), (("mlp", ("model", "stage")), ("embed", "dp"))
RULES = (OF_BATCH, *OF_WEIGHTS, ("heads", "model"), ("layers", "stage"))
"""Of another mesh too: one with an axis `pod`."""


def test_logical_axis_rules(make_mesh):
    """Those in context when a pipeline sees its first batch hold for it from then on, whatever shapes come later."""
    with jax.enable_x64(True):
        named = functools.partial(linear, names=("embed", "mlp"))
        own = functools.partial(named, sharding_rules=(("embed", "dp"),))
        truth = between_ends(Logical(), linear, Logical(), linear)
        mesh = make_mesh((2, 2, 2), ("stage", "dp", "model"))
        layers = [truth.layers[0], Logical(), named, Logical(), own, truth.layers[-1]]
        pipe = pipeline(replace(truth, layers=layers), "1f1b", 2, 3, mesh=mesh, balance="even", batch_axes="dp")
        with nn.logical_axis_rules(RULES):
            pipe.from_layer_variables(truth.trees, truth.batch)
        check_step(pipe, truth)
        groups = [pipe.plan.model.group_at(index) for index in range(6)]
        split = lambda index: [tuple(spec) for spec in groups[index].specs["params"] if any(spec)]
        assert split(1) == split(3) == [("dp", "model"), ("model", "dp")]
        assert split(2) == split(4) == [("dp", "model")]
        smaller = jax.tree.map(lambda a: a[: len(a) // 2], truth.batch)
        again = pipe.planner.model(pipe.planner.for_training(smaller)).group_at(1)
        assert again.specs == groups[1].specs
        assert again.constrained == groups[1].constrained == {"dp", "model"}


def test_logical_names_without_rules_split_nothing(make_mesh):
    mesh, x = make_mesh(*STAGE_MODEL), ones(4, 4)

    def make(*names):
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
        return small(*[nn.Dense(4, kernel_init=init)] * 2, mesh=mesh)

    with nn.logical_axis_rules((("embed", "model"),)):
        assert "model" in names_of(make("embed", "model").init(KEY, x))
    with pytest.warns(UserWarning, match="nothing is split over the mesh axis 'model'.*, nn.logical_axis_rules"):
        make("embed", "model").init(KEY, x)
    with pytest.raises(ValueError, match=r"layer 0 \(Dense\) raised ValueError.*'embed'"):
        make("embed", "embed").init(KEY, x)


@pytest.mark.parametrize("explicit", [False, pytest.param(True, marks=SLOW)])
def test_training_on_a_mesh_with_all_axes(make_mesh, explicit):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        truth, results = truth_of("split"), []
        tx = optax.chain(optax.clip_by_global_norm(0.1), jpipe.per_layer(optax.adamw(1e-2)))
        for mesh in (make_mesh((2, 2, 2), ("stage", "data", "model"), explicit=explicit), None):
            pipe = pipeline(truth, "1f1b", 2, 3, mesh=mesh, balance="even")
            state = pipe.create_state(KEY, truth.batch, tx)
            lying = lambda state: [names_of(leaf) for leaf in jax.tree.leaves((state.variables, state.opt_state))]
            before = lying(state)
            for _ in range(2):
                state, metrics = pipe.train_step(state, truth.batch)
            assert lying(state) == before
            results.append(jax.device_get((metrics, pipe.layer_variables(state.variables))))
        assert_close(*results, "after two steps")


def test_initial_values_do_not_depend_on_the_mesh():
    # In a process of its own with the usual machine code, as the quick one rounds a fusion by its shape.
    with Worker(flags=quick.in_words({"xla_force_host_platform_device_count": "8"} | quick.CODE)) as worker:
        assert worker.value("split_model", "leaves_that_differ", [2, 2, 2]) == []


def test_each_stages_parameters_are_on_its_devices_alone(make_mesh):
    """Which numbers a device holds, whatever the buffers in which they lie: all are random, and so differ."""
    truth = model("linen", "float32")
    mesh = make_mesh((4, 2), ("stage", "data"))
    pipe = pipeline(truth, "1f1b", 4, 3, mesh=mesh, balance="even")
    variables = pipe.from_layer_variables(truth.trees, truth.batch)
    held = {device: [] for device in mesh.devices.flat}
    for leaf in jax.tree.leaves(variables):
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("stage")), leaf.ndim)
        for shard in leaf.addressable_shards:
            held[shard.device].append(np.ravel(shard.data))
    ends = [*pipe.partition.cuts, len(truth.trees)]
    for stage, devices in enumerate(mesh.devices):
        layers = range(ends[stage - 1] if stage else 0, ends[stage])
        own = np.concatenate([np.ravel(leaf) for i in layers for leaf in jax.tree.leaves(truth.trees[i])])
        for device in mesh.devices.flat:
            is_held = np.isin(own, np.concatenate(held[device]))
            assert is_held.all() if device in devices else not is_held.any(), f"stage {stage}, {device}"


# --- what is the same without a mesh: regressions ---------------------------------------------------------------------


def results_of(layers, x, key=None, **options):
    """Loss, every gradient, outputs and evaluation."""
    pipe = small(*layers, **options)
    variables = pipe.from_layer_variables(pipe.layer_variables(pipe.init(KEY, x)))
    (loss, _), grads = pipe.value_and_grad(variables, x, key)
    found = loss, pipe.layer_variables({"params": grads}), pipe.apply(variables, x), pipe.evaluate(variables, x)
    return jax.device_get(found)


def boundaries_of_many_shapes():
    """With a scalar beside."""
    to = lambda *shape: lambda x, a: (x.reshape(x.shape[0], *shape), a)
    first = [nn.Dense(64), lambda x: (x, jnp.zeros(())), to(2, 32), to(4, 16), to(8, 8), to(16, 4), to(32, 2)]
    return [*first, lambda x, a: x.sum(2) + a]


def looked_up(*names):
    table = nn.with_partitioning(nn.initializers.normal(1.0), (names, None))
    return [nn.Embed(16, 8, embedding_init=table), nn.Dense(8), nn.Dense(4)]


def half_dropped(rngs):
    return nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))


def solved(w, x):
    return jnp.linalg.solve(w @ w.T + jnp.eye(8, dtype=w.dtype), x.reshape(-1, 8).T).T.reshape(x.shape)


SOLVER = jpipe.Layer(lambda key, x: jax.random.normal(key, (8, 8), x.dtype), solved)
IDS = np.random.default_rng(0).integers(0, 16, (8, 3)).astype(np.int32)
THREE = ("stage", "fsdp", "tp")
AUTO, EXPLICIT = False, True
SAME = {
    # The compiler resharded the flat buffer by permutes over all devices, in loops that not all of them ran: it hung.
    "a scalar among boundaries": (boundaries_of_many_shapes(), (2, 2), ("stage", "data"), AUTO, random(8, 64)),
    "slow: of two chunks": (boundaries_of_many_shapes(), (2, 2), ("stage", "data"), EXPLICIT, random(8, 64)),
    # A look-up in such a table aborted the process, in XLA's partitioner.
    "a table over two axes": (looked_up("tp", "fsdp"), (2, 2, 2), THREE, AUTO, IDS),
    # Sums over a stage axis of one device failed in the compiler where other axes were its own.
    "slow: one stage": ([split_dense(8, None, "model"), nn.Dense(4)], (1, 2), ("stage", "model"), AUTO, ones(4, 8)),
    # Nothing told the compiler that more than one device takes part.
    "no parameters": ([jnp.sin, jnp.tanh], (2,), ("stage",), EXPLICIT, ones(4, 8)),
    # Programs kept types of the mesh under which they were traced.
    "nnx dropout": ([nn.Dense(8), half_dropped, nn.Dense(8)], *STAGE_DATA, AUTO, random(8, 3, 8)),
    "slow: linear solver": ([nn.Dense(8), SOLVER, nn.Dense(8)], *STAGE_DATA, AUTO, random(8, 3, 8)),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW) if n.startswith("slow: ") else n for n in SAME])
def test_values_are_those_without_a_mesh(make_mesh, name):
    layers, shape, axes, explicit, x = SAME[name]
    options = {"num_stages": shape[0], "mesh": make_mesh(shape, axes, explicit=explicit)}
    options |= {"num_chunks": 2, "schedule": "interleaved"} if name == "of two chunks" else {}
    key = jax.random.key(1)
    assert_close(results_of(layers, x, key, **options), results_of(layers, x, key, num_stages=1), "on the mesh")


def test_a_constraint_that_names_its_mesh(make_mesh):
    """A regression: JAX adds an operation to it that was carried out under another mesh."""
    mesh, x = make_mesh(*STAGE_DATA), random(8, 8)
    fixed = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("data")))
    found = [results_of([nn.Dense(8), layer, nn.Dense(8)], x, mesh=mesh) for layer in (fixed, lambda x: x)]
    assert_close(*found, "constrained")


def test_variables_on_the_host_and_modules_on_an_explicit_mesh(make_mesh):
    """Regressions: nothing told the compiler about the devices; what came back could not be computed with."""
    pipe, x = small(nn.Dense(8), nn.Dense(8), mesh=make_mesh(*STAGE_DATA, explicit=True)), random(8, 8)
    variables = pipe.init(KEY, x)
    expected = pipe.apply(variables, x)
    assert_close(pipe.apply(jax.device_get(variables), x), expected, "from the host")
    first, second = pipe.modules(variables)
    assert_close(second(first(x)), expected, "modules")


# --- layers that are programs of single devices -----------------------------------------------------------------------


def over_all_axes(mesh, inside):
    """A layer that is manual over every axis of the mesh, `stage` too, as `jax.shard_map` is by default."""
    specs = {"in_specs": (PartitionSpec("fsdp"), PartitionSpec(None, "tp")), "out_specs": PartitionSpec("fsdp", "tp")}

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = nn.with_partitioning(nn.initializers.normal(0.3), (None, "tp"))
            w = self.param("w", kernel, (8, 8), x.dtype)
            if mesh is None:
                return x + inside(x, w, lambda y, _: y)
            run = lambda x, w: inside(x, w, jax.lax.psum)
            return x + jax.shard_map(run, mesh=mesh, check_vma=False, **specs)(x, w)

    return Layer()


@pytest.mark.filterwarnings("ignore:.*look.* at several examples")
@pytest.mark.parametrize("sums", [pytest.param(False, marks=SLOW), True])
def test_a_program_of_single_devices_that_is_manual_over_stages_too(make_mesh, sums):
    """A regression: the transpose summed over `stage`, and the first step waited for other stages for ever."""

    def inside(x, w, add):
        y = jnp.tanh(x @ w)
        return y + add(y.sum(), ("fsdp", "tp")) / 64 if sums else y

    mesh, x = make_mesh((2, 2, 2), THREE), random(8, 8, dtype=np.float64)
    with jax.enable_x64(True):
        found = [results_of([over_all_axes(own, inside)] * 4, x, mesh=own) for own in (mesh, None)]
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:nothing is split over the mesh axis 'model'")  # by the plain layers
@pytest.mark.parametrize("balance", [pytest.param("even", marks=SLOW), "flops"])
def test_a_program_of_single_devices_in_a_layer(make_mesh, balance):
    """`jax.shard_map` in a layer runs as it is; a permutation in it doesn't reach other stages."""
    mesh = make_mesh((2, 2, 2), ("stage", "data", "model"))
    spec = PartitionSpec("data", None, "model")

    def turned(x):
        swapped = lambda a: jax.lax.ppermute(a, "model", [(0, 1), (1, 0)])
        inside = lambda a: swapped(a) * (1 + jax.lax.axis_index("model")).astype(a.dtype)
        return jax.shard_map(inside, in_specs=spec, out_specs=spec, axis_names={"data", "model"})(jnp.sin(x))

    def plain(x):
        return jnp.roll(jnp.sin(x), 4, 2) * jnp.repeat(jnp.asarray([1, 2], x.dtype), 4)

    layers = [[nn.Dense(8), layer, nn.Dense(8), layer] for layer in (turned, plain)]
    found = [results_of(each, random(8, 3, 8), mesh=mesh, balance=balance) for each in layers]
    assert_close(*found, "shard_map")


@jax.custom_vjp
def summed_backward(x):
    return x


summed_backward.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.psum(g, "stage"),))


def of_single_devices(function):
    return jax.shard_map(function, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)


OVER_STAGES = {
    "psum": lambda x: jax.lax.psum(x, "stage"),
    "all_gather": lambda x: jax.lax.all_gather(x, "stage", axis=0, tiled=True)[: len(x)],
    "ppermute": lambda x: jax.lax.ppermute(x, "stage", [(0, 1), (1, 0)]),
    "axis_index": lambda x: x * jax.lax.axis_index("stage"),
    "in a branch": lambda x: jax.lax.cond(x.sum() > 0, lambda x: jax.lax.psum(x, "stage"), lambda x: x, x),
    "in the backward": summed_backward,
    "in a shard_map": lambda x: of_single_devices(lambda x: jax.lax.psum(x, "stage"))(x),
    "in the backward of a shard_map": lambda x: of_single_devices(summed_backward)(x),
}


@pytest.mark.parametrize("where", ["layer", "loss"])
@pytest.mark.parametrize("name", OVER_STAGES)
def test_a_collective_over_stages_is_refused_before_anything_compiles(make_mesh, name, where):
    """It would wait for stages that run other layers."""
    between = OVER_STAGES[name] if where == "layer" else jnp.tanh
    loss = lambda y, _: jnp.mean(OVER_STAGES[name](y) if where == "loss" else y)
    options = SIZES | {"mesh": make_mesh(*STAGE_DATA)}
    with pytest.raises((ValueError, NameError), match="stage"):
        pipe = jpipe.Pipeline([nn.Dense(8), between, nn.Dense(8)], loss, **options)
        jax.eval_shape(pipe.value_and_grad, jax.eval_shape(pipe.init, KEY, ones(4, 8)), ones(4, 8))


# --- what can't be done -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_axes": ("data", "stage")}, ValueError, "names 'stage'"),
        ({"batch_axes": 2}, TypeError, "batch_axes=2 aren't names"),
        ({"batch_axes": "expert", "shard_over": "data"}, ValueError, r"names 'data'; the data axes are \['expert'\]"),
        ({"shard_over": ("date",)}, ValueError, r"shard_over=\('date',\) names 'date'; the data axes are \['data'\]"),
        ({"gather": "always"}, ValueError, r"gather='always' is unknown; use one of \['step', 'use'\]"),
        ({"mesh": "mixed"}, ValueError, r"mesh has axes of the types .*; make them all Auto or all Explicit"),
    ],
)
def test_wrong_options(make_mesh, options, error, message):
    mixed = jax.make_mesh((2, 2), ("stage", "data"), axis_types=(AxisType.Auto, AxisType.Explicit))
    mesh = mixed if "mesh" in options else make_mesh((2, 2, 2), ("stage", "data", "expert"))
    with pytest.raises(error, match=message):
        small(nn.Dense(4), nn.Dense(4), **options | {"mesh": mesh})


class Heads(nn.Module):
    """Flax makes the kernel of `nn.DenseGeneral` flat, and constrains it by its metadata where it finds a mesh."""

    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model", None))
        q = nn.DenseGeneral((2, 4), kernel_init=init)(x)
        return nn.DenseGeneral(8, axis=(-2, -1))(jax.lax.with_sharding_constraint(q, PartitionSpec(None, "model")))


def indexed(axis):
    return lambda x: x + jax.lax.axis_index(axis).astype(x.dtype)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            split_dense(5, None, "model"),
            r"layer 1 \(Dense\) asks for params\['kernel'\].* \('model',\) of 2 devices, which don't divide 5",
        ),
        (
            Heads(),
            r"\(Heads\) constrains .* ValueError at test_meshes.py:\d+, `q = .*`: .*nn.DenseGeneral makes .* flat",
        ),
        (indexed("model"), r"layer 1 .*axis_index over the mesh axis 'model': a layer sees whole arrays"),
    ],
)
def test_layers_that_do_not_fit_the_mesh(make_mesh, layer, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(small(nn.Dense(4), layer, mesh=make_mesh(*STAGE_MODEL)).init, KEY, ones(4, 4))


def test_another_mesh_in_context(make_mesh):
    pipe = small(nn.Dense(4), num_stages=1)
    with jax.set_mesh(make_mesh((2,), ("data",))), pytest.raises(ValueError, match=r"the mesh in context .*'data': 2"):
        pipe.init(KEY, ones(2, 4))


class OnItsMesh(nnx.Module):
    """A layer that names another mesh: where it is made, how its weights or activations are split, in a `shard_map`."""

    def __init__(self, mesh, place, rngs):
        split = NamedSharding(mesh, PartitionSpec(None, "model"))
        constrain = lambda x: jax.lax.with_sharding_constraint(x, split)
        init = nnx.initializers.lecun_normal()
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if place == "context" else contextlib.nullcontext():
            kernel_init = (lambda *of: constrain(init(*of))) if place == "weights" else init
            self.dense = nnx.Linear(4, 4, kernel_init=kernel_init, rngs=rngs)
        mapped = jax.shard_map(jnp.tanh, mesh=mesh, in_specs=split.spec, out_specs=split.spec)
        self.after = {"activations": constrain, "shard_map": mapped}.get(place, jnp.tanh)

    def __call__(self, x):
        return self.after(self.dense(x))


@pytest.mark.parametrize("place", ["context", "activations", "shard_map"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_model_on_another_mesh(make_mesh, place, whole):
    """A regression: "context mesh ... should match the aval mesh", or an error of shard_map's, from inside of jpipe."""
    theirs, x = make_mesh((2, 2), ("data", "model")), ones(4, 4)
    model = lambda rngs: OnItsMesh(theirs, place, rngs)
    pipe = jpipe.Pipeline(model if whole else [model, model], square, **SIZES, mesh=make_mesh((2,)))
    words = r"OnItsMesh\)? works on the mesh {'data': 2, 'model': 2}, but the pipeline's is {'stage': 2}; .* mesh=\)"
    with compilations() as count:
        with pytest.raises(ValueError, match=words):
            pipe.init(KEY, x)
        assert count() == 0, "the error came after something was compiled"


def test_weights_that_name_another_mesh(make_mesh):
    """Where new weights lie isn't theirs to say. A regression: "incompatible devices for jitted computation"."""
    theirs, x = make_mesh((2, 2), ("data", "model")), random(4, 4)
    pipe = small(lambda rngs: OnItsMesh(theirs, "weights", rngs), num_stages=1)
    variables = pipe.init(KEY, x)
    (module,) = pipe.modules(variables)
    assert_close(pipe.apply(variables, x), module(x))


# --- evaluation and metrics -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [7, 13])
def test_evaluation_of_any_batch(make_mesh, size):
    """A regression: `apply` and `evaluate` refused batches that M, or the data axes, don't divide."""
    pipe, x = small(nn.Dense(8), nn.tanh, nn.Dense(4), num_microbatches=4, mesh=make_mesh(*STAGE_DATA)), random(16, 6)
    variables = pipe.init(KEY, x)
    first, _, last = pipe.modules(variables)
    expected = last(nn.tanh(first(x[:size])))
    assert_close(pipe.apply(variables, x[:size]), expected, "outputs")
    assert_close(pipe.evaluate(variables, x[:size]), jnp.mean(jnp.square(expected)), "loss")
