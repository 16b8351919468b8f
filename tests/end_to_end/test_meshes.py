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
from cases import VOCABULARY, WIDTH, assert_close, make_model, model, pipeline, tokens, weighted_cross_entropy
from split_model import split_model
from timed import Worker


@pytest.fixture(scope="module", name="split_model")
def split_model_fixture():
    with jax.enable_x64(True):
        return split_model()


def check(truth, mesh, k, m, *, set_mesh=False, **options):
    loss, outputs, grads = truth.truth  # before the mesh is set, which is what calling jax.set_mesh does
    with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
        pipe = pipeline(truth, "1f1b", k, m, mesh=mesh, **options)
        variables = pipe.from_layer_variables(truth.trees, truth.batch)
        (found, _), gradients = pipe.value_and_grad(variables, truth.batch)
        trees = pipe.layer_variables({"params": gradients})
        results = pipe.apply(variables, truth.batch), pipe.evaluate(variables, truth.batch)
    assert_close(found, loss, "loss")
    assert_close(trees, grads, "gradients")
    assert_close(results[0], outputs, "outputs")
    assert_close(results[1], loss, "evaluation")
    return pipe, variables


@pytest.mark.parametrize(
    ("kind", "shape", "explicit", "set_mesh", "remat"),
    [
        pytest.param("linen", (2, 2), False, False, "layer", marks=pytest.mark.slow),
        pytest.param("linen", (4, 2), True, False, "none", marks=pytest.mark.slow),
        ("mixed", (2, 2), True, True, "none"),
        pytest.param("mixed", (4, 2), False, True, "stage", marks=pytest.mark.slow),
        pytest.param("alternating", (4, 2), False, False, "full", marks=pytest.mark.slow),
        pytest.param("nnx factories", (2, 2), True, True, "layer", marks=pytest.mark.slow),
        pytest.param("plain", (2, 4), True, False, "none", marks=pytest.mark.slow),
    ],
)
def test_data_axis(make_mesh, kind, shape, explicit, set_mesh, remat):
    with jax.enable_x64(True):
        mesh = make_mesh(shape, ("stage", "data"), explicit=explicit)
        check(model(kind), mesh, shape[0], 3, set_mesh=set_mesh, remat=remat)


@pytest.mark.parametrize("axis", ["fsdp", "replica"])
@pytest.mark.slow
def test_axes_of_other_names(make_mesh, axis):
    with jax.enable_x64(True):
        check(model("linen"), make_mesh((2, 2), ("stage", axis)), 2, 3)


class Experts(nn.Module):
    """A sum over experts, whose weights metadata splits over `expert`, and at rest over `dp_replicate` too."""

    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.normal(0.3), ("expert", None, "dp_replicate"))
        w = self.param("w", init, (4, WIDTH, WIDTH), x.dtype)
        return x + jnp.einsum("bsi,eij->bsj", jnp.tanh(x), w)


@pytest.fixture(scope="module")
def experts_model():
    with jax.enable_x64(True):
        embed = nn.Embed(VOCABULARY, WIDTH, param_dtype=jnp.float64, dtype=jnp.float64)
        layers = [embed, Experts(), Experts(), Experts(), nn.Dense(VOCABULARY, param_dtype=jnp.float64)]
        return make_model(layers, weighted_cross_entropy, tokens())


@pytest.mark.parametrize("gather", ["step", "use"])
def test_batch_axes(make_mesh, experts_model, gather):
    """Values are the sequential model's, and `dp_replicate` is a data axis: parts of batches, ZeRO-1, gathered."""
    with jax.enable_x64(True):
        mesh = make_mesh((2, 2, 2), ("stage", "dp_replicate", "expert"))
        options = {"batch_axes": ("dp_replicate",), "shard_over": "dp_replicate", "gather": gather, "balance": "even"}
        pipe, variables = check(experts_model, mesh, 2, 3, **options)
        axes = {name for leaf in jax.tree.leaves(variables) for name in jax.tree.leaves(tuple(leaf.sharding.spec))}
        assert axes == {"stage", "dp_replicate", "expert"}
        placed = pipe.place(experts_model.batch)
        for whole, leaf in zip(jax.tree.leaves(experts_model.batch), jax.tree.leaves(placed), strict=True):
            assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {len(whole) // 2}
        assert pipe.plan.model.axes[0].names == ("dp_replicate",)
        assert copy.copy(pipe).planner.request.splits == pipe.planner.request.splits


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_axes": ("data", "stage")}, ValueError, "names 'stage'"),
        (
            {"batch_axes": ("dp",)},
            ValueError,
            r"names 'dp', which the mesh \{'stage': 2, 'data': 2, 'expert': 2\} lacks",
        ),
        ({"batch_axes": ("expert", "expert")}, ValueError, "names 'expert' 2 times"),
        ({"batch_axes": 2}, TypeError, "batch_axes=2 aren't names"),
        (
            {"batch_axes": "expert", "shard_over": "data"},
            ValueError,
            r"names 'data'; the data axes are \['expert'\]",
        ),
    ],
)
def test_wrong_batch_axes(make_mesh, options, error, message):
    mesh = make_mesh((2, 2, 2), ("stage", "data", "expert"))
    with pytest.raises(error, match=message):
        jpipe.Pipeline([nn.Dense(4)] * 2, lambda y, _: y.mean(), num_stages=2, num_microbatches=1, mesh=mesh, **options)


def test_a_mesh_axis_that_nothing_is_split_over_is_named(make_mesh):
    x, sizes = np.ones((4, 4), np.float32), {"num_stages": 2, "num_microbatches": 1, "balance": "even"}
    make = lambda *layers, **options: jpipe.Pipeline(layers, lambda y, _: y.mean(), **sizes, **options)
    mesh = make_mesh((2, 2), ("stage", "idle"))
    with pytest.warns(UserWarning, match="nothing is split over the mesh axis 'idle': its 2 devices"):
        make(nn.Dense(4), nn.Dense(4), mesh=mesh).init(jax.random.key(0), x)
    mesh = make_mesh((2, 2), ("stage", "context"))
    named = lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec(None, "context"))
    make(nn.Dense(4), named, mesh=mesh).init(jax.random.key(0), x)
    make(nn.Dense(4), nn.Dense(4), mesh=mesh, batch_axes="context").init(jax.random.key(0), x)


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


RULES = (
    ("batch", ("pod", "dp")),
    ("mlp", ("model", "stage")),
    ("embed", "dp"),
    ("heads", "model"),
    ("layers", "stage"),
)
"""Of another mesh too: one with an axis `pod`."""


def test_logical_axis_rules(make_mesh):
    """Those in context when a pipeline sees its first batch hold for it from then on, whatever shapes come later."""
    with jax.enable_x64(True):
        named = functools.partial(linear, names=("embed", "mlp"))
        own = functools.partial(named, sharding_rules=(("embed", "dp"),))
        embed = nn.Embed(VOCABULARY, WIDTH, param_dtype=jnp.float64, dtype=jnp.float64)
        layers = lambda *nnx: [
            embed,
            Logical(),
            nnx[0],
            Logical(),
            nnx[1],
            nn.Dense(VOCABULARY, param_dtype=jnp.float64),
        ]
        truth = make_model(layers(linear, linear), weighted_cross_entropy, tokens())
        loss, outputs, grads = truth.truth
        mesh = make_mesh((2, 2, 2), ("stage", "dp", "model"))
        truth = replace(truth, layers=layers(named, own))
        pipe = pipeline(truth, "1f1b", 2, 3, mesh=mesh, balance="even", batch_axes="dp")
        with nn.logical_axis_rules(RULES):
            variables = pipe.from_layer_variables(truth.trees, truth.batch)
        (found, _), gradients = pipe.value_and_grad(variables, truth.batch)
        assert_close(found, loss, "loss")
        assert_close(pipe.layer_variables({"params": gradients}), grads, "gradients")
        assert_close(pipe.apply(variables, truth.batch), outputs, "outputs")
        groups = [pipe.plan.model.group_at(index) for index in range(6)]
        split = lambda index: [tuple(spec) for spec in groups[index].specs["params"] if any(spec)]
        assert split(1) == split(3) == [("dp", "model"), ("model", "dp")]
        assert split(2) == split(4) == [("dp", "model")]
        assert groups[1].constrained == {"dp", "model"}
        smaller = jax.tree.map(lambda a: a[: len(a) // 2], truth.batch)
        again = pipe.planner.model(pipe.planner.for_training(smaller))
        assert again.group_at(1).specs == groups[1].specs
        assert again.group_at(1).constrained == {"dp", "model"}


def test_logical_names_without_rules_split_nothing(make_mesh):
    kernel = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "model"))
    mesh, x = make_mesh((2, 2), ("stage", "model")), np.ones((4, 4), np.float32)
    sizes = {"num_stages": 2, "num_microbatches": 1, "balance": "even", "mesh": mesh}
    make = lambda kernel: jpipe.Pipeline([nn.Dense(4, kernel_init=kernel)] * 2, lambda y, _: y.mean(), **sizes)
    with nn.logical_axis_rules((("embed", "model"),)):
        found = make(kernel).init(jax.random.key(0), x)["params"]
    assert "model" in {name for leaf in found.values() for name in leaf.sharding.spec}
    with pytest.warns(UserWarning, match="nothing is split over the mesh axis 'model'.*, nn.logical_axis_rules"):
        make(kernel).init(jax.random.key(0), x)
    twice = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "embed"))
    with pytest.raises(ValueError, match=r"layer 0 \(Dense\) names the logical axes \('embed', 'embed'\). Flax says"):
        make(twice).init(jax.random.key(0), x)


def test_stage_need_not_be_the_first_axis(make_mesh):
    with jax.enable_x64(True):
        check(model("plain"), make_mesh((2, 2), ("data", "stage")), 2, 3)


@pytest.mark.parametrize("set_mesh", [False, True])
def test_default_explicit_mesh_of_stages_alone(set_mesh):
    with jax.enable_x64(True):
        mesh = jax.make_mesh((3,), ("stage",))
        assert mesh.axis_types == (AxisType.Explicit,)
        check(model("plain"), mesh, 3, 4, set_mesh=set_mesh)


@pytest.mark.parametrize(("explicit", "set_mesh"), [(False, False), (True, True)])
def test_model_axis(make_mesh, split_model, explicit, set_mesh):
    with jax.enable_x64(True):
        mesh = make_mesh((2, 2, 2), ("stage", "data", "model"), explicit=explicit)
        _, variables = check(split_model, mesh, 2, 3, set_mesh=set_mesh, balance=[3, 4])
        split = [
            leaf
            for leaf in jax.tree.leaves(variables["params"])
            if "model" in jax.tree.leaves(tuple(leaf.sharding.spec))
        ]
        assert len(split) == 3, "two kernels and a bias"
        for leaf in split:
            (axis,) = [i for i, name in enumerate(leaf.sharding.spec) if name == "model"]
            assert leaf.shape[axis] == 2 * WIDTH, "each along the hidden features"


def test_metadata_comes_back(make_mesh, split_model):
    """`layer_variables` gives what `module.init` would have returned, boxes included."""
    with jax.enable_x64(True):
        pipe = pipeline(split_model, "1f1b", 2, 3, balance="even")
        variables = pipe.from_layer_variables(split_model.trees, split_model.batch)
        trees = pipe.layer_variables(variables)
        assert_close(trees, split_model.trees, "variables")
        kernel = trees[1]["params"]["Dense_0"]["kernel"]
        assert isinstance(kernel, nn.Partitioned)
        assert kernel.names == (None, "model")


@pytest.mark.parametrize("explicit", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_training_on_a_mesh_with_all_axes(make_mesh, split_model, explicit):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        mesh = make_mesh((2, 2, 2), ("stage", "data", "model"), explicit=explicit)
        pipe = pipeline(split_model, "1f1b", 2, 3, mesh=mesh, balance="even")
        alone = pipeline(split_model, "1f1b", 2, 3, balance="even")
        tx = optax.chain(optax.clip_by_global_norm(0.1), jpipe.per_layer(optax.adamw(1e-2)))
        results = []
        for p in (pipe, alone):
            state = p.create_state(jax.random.key(0), split_model.batch, tx)
            before = jax.tree.map(lambda leaf: leaf.sharding, (state.variables, state.opt_state))
            for _ in range(2):
                state, metrics = p.train_step(state, split_model.batch)
            after = jax.tree.map(lambda leaf: leaf.sharding, (state.variables, state.opt_state))
            for (path, old), new in zip(
                jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
            ):
                assert set(jax.tree.leaves(tuple(old.spec))) == set(jax.tree.leaves(tuple(new.spec))), path
            results.append(jax.device_get((metrics, p.layer_variables(state.variables))))
        assert_close(results[0], results[1], "after two steps")


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


def test_metadata_that_does_not_divide(make_mesh):
    kernel = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    layers = [nn.Dense(4, kernel_init=kernel), nn.Dense(5, kernel_init=kernel)]
    mesh = make_mesh((2, 2), ("stage", "model"))
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=2, num_microbatches=1, mesh=mesh, balance="even")
    message = r"layer 1 \(Dense\) asks for params\['kernel'\].* \('model',\) of 2 devices, which don't divide 5"
    with pytest.raises(ValueError, match=message):
        pipe.init(jax.random.key(0), np.ones((2, 4), np.float32))


@pytest.mark.parametrize("name, wrong", [("modl", True), ("model", False)])
def test_metadata_that_names_an_axis_which_the_mesh_lacks(make_mesh, name, wrong):
    kernel = nn.with_partitioning(nn.initializers.lecun_normal(), (None, name))
    layers, x = [nn.Dense(4), nn.Dense(4, kernel_init=kernel)], np.ones((2, 4), np.float32)
    sizes = {"num_stages": 2, "num_microbatches": 1, "balance": "even"}
    make = lambda mesh: jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), **sizes, mesh=mesh)
    make(make_mesh((2,))).init(jax.random.key(0), x)  # a model can be tried without the axis
    pipe = make(make_mesh((2, 2), ("stage", "model")))
    if not wrong:
        pipe.init(jax.random.key(0), x)
        return
    message = r"layer 1 \(Dense\) asks for an axis 'modl', none for the mesh's 'model'; name both alike"
    with pytest.raises(ValueError, match=message):
        pipe.init(jax.random.key(0), x)


def test_another_mesh_in_context(make_mesh):
    pipe = jpipe.Pipeline([nn.Dense(4)], lambda y, _: jnp.mean(y), num_stages=1, num_microbatches=1, balance="even")
    with jax.set_mesh(make_mesh((2,), ("data",))), pytest.raises(ValueError, match=r"the mesh in context .*'data': 2"):
        pipe.init(jax.random.key(0), np.ones((2, 4), np.float32))


# --- regressions ------------------------------------------------------------------------------------------------------


def against_no_mesh(layers, mesh, x, m=2, loss_fn=lambda y, _: jnp.mean(jnp.square(y))):
    """Loss, every gradient, outputs and evaluation on a mesh against those of one device."""
    results = []
    sizes = ({"num_stages": mesh.shape["stage"], "mesh": mesh}, {"num_stages": 1})
    for options in sizes:
        pipe = jpipe.Pipeline(layers, loss_fn, num_microbatches=m, balance="even", **options)
        trees = pipe.layer_variables(pipe.init(jax.random.key(0), x))
        variables = pipe.from_layer_variables(trees)
        (loss, _), grads = pipe.value_and_grad(variables, x)
        found = loss, pipe.layer_variables({"params": grads}), pipe.apply(variables, x), pipe.evaluate(variables, x)
        results.append(jax.device_get(found))
    assert_close(*results, "on the mesh")


@pytest.mark.parametrize(("explicit", "k", "v"), [(False, 2, 1), (True, 2, 3), (False, 4, 1)])
def test_a_scalar_among_the_boundaries(make_mesh, explicit, k, v):
    """A regression (F1): with a data axis and a flat boundary buffer, a scalar at a boundary made the step hang.

    The compiler resharded the buffer by `collective-permute`s over all devices, in loops that not all of them ran.
    """
    to = lambda *shape: lambda x, a: (x.reshape(x.shape[0], *shape), a)
    layers = [nn.Dense(64), lambda x: (x, jnp.zeros(())), to(2, 32), to(4, 16), to(8, 8), to(16, 4), to(32, 2)]
    layers = [*layers, lambda x, a: x.sum(2) + a]
    mesh = make_mesh((k, 2), ("stage", "data"), explicit=explicit)
    x = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    if v == 1:
        against_no_mesh(layers, mesh, x)
    else:
        sizes = {"num_stages": k, "num_microbatches": 2, "num_chunks": v, "schedule": "interleaved"}
        pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), **sizes, mesh=mesh, balance="even")
        assert np.isfinite(pipe.evaluate(pipe.init(jax.random.key(0), x), x))


def half_dropped(rngs):
    return nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))


def solved(w, x):
    return jnp.linalg.solve(w @ w.T + jnp.eye(8, dtype=w.dtype), x.reshape(-1, 8).T).T.reshape(x.shape)


def split_attention():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model", None))
    return nn.MultiHeadDotProductAttention(4, kernel_init=init, use_bias=False)


@pytest.mark.parametrize(
    ("layer", "axis"),
    [
        (half_dropped, "data"),
        (jpipe.Layer(lambda key, x: jax.random.normal(key, (8, 8), x.dtype), solved), "data"),
        pytest.param(split_attention(), "model", marks=pytest.mark.slow),
        (lambda x: jnp.where(x > 0, x, 0.5), "data"),
    ],
    ids=["nnx dropout", "linear solver", "attention with metadata", "weak scalars"],
)
def test_layers_that_remember_the_mesh(make_mesh, layer, axis):
    """Regressions: programs kept types of the mesh under which they were traced, and failed with raw errors."""
    x = np.random.default_rng(0).standard_normal((8, 3, 8)).astype(np.float32)
    results = []
    for options in ({"num_stages": 2, "mesh": make_mesh((2, 2), ("stage", axis))}, {"num_stages": 1}):
        options |= {"num_microbatches": 2, "balance": "even"}
        pipe = jpipe.Pipeline([nn.Dense(8), layer, nn.Dense(8)], lambda y, _: jnp.mean(y * y), **options)
        variables = pipe.from_layer_variables(pipe.layer_variables(pipe.init(jax.random.key(0), x)))
        (loss, _), grads = pipe.value_and_grad(variables, x, jax.random.key(1))
        results.append(jax.device_get((loss, pipe.layer_variables({"params": grads}))))
    assert_close(*results, "on the mesh")


def test_a_constraint_that_names_its_mesh(make_mesh):
    """A regression: JAX adds an operation to it that was carried out under another mesh."""
    mesh = make_mesh((2, 2), ("stage", "data"))
    fixed = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("data")))
    options = {"num_stages": 2, "num_microbatches": 2, "mesh": mesh}
    models = [[nn.Dense(8), layer, nn.Dense(8)] for layer in (fixed, lambda x: x)]
    pipes = [jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), **options) for layers in models]
    x = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    losses = [pipe.value_and_grad(pipe.init(jax.random.key(0), x), x)[0][0] for pipe in pipes]
    assert_close(*losses, "loss")


def test_variables_on_the_host_and_modules_on_an_explicit_mesh(make_mesh):
    """Regressions: nothing told the compiler about the devices; what came back could not be computed with."""
    mesh = make_mesh((2, 2), ("stage", "data"), explicit=True)
    options = {"num_stages": 2, "num_microbatches": 2, "balance": "even", "mesh": mesh}
    pipe = jpipe.Pipeline([nn.Dense(8), nn.Dense(8)], lambda y, _: jnp.mean(y), **options)
    x = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    variables = pipe.init(jax.random.key(0), x)
    expected = pipe.apply(variables, x)
    assert_close(pipe.apply(jax.device_get(variables), x), expected, "from the host")
    y = x
    for module in pipe.modules(variables):
        y = module(y)
    assert_close(y, expected, "modules")


def test_values_without_metadata(make_mesh):
    """A regression: pretrained weights, which are in no boxes, were refused where layers have metadata."""
    kernel = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    mesh = make_mesh((2, 2), ("stage", "model"))
    options = {"num_stages": 2, "num_microbatches": 2, "balance": "even", "mesh": mesh}
    pipe = jpipe.Pipeline([nn.Dense(8, kernel_init=kernel), nn.Dense(8)], lambda y, _: jnp.mean(y), **options)
    x = np.ones((8, 8), np.float32)
    trees = pipe.layer_variables(pipe.init(jax.random.key(0), x))
    assert_close(pipe.layer_variables(pipe.from_layer_variables(nn.meta.unbox(trees))), trees, "there and back")


def test_axes_of_several_types_are_refused():
    axes = {"axis_types": (AxisType.Auto, AxisType.Explicit)}
    mesh = jax.make_mesh((2, 2), ("stage", "data"), **axes)
    with pytest.raises(ValueError, match=r"mesh has axes of the types .*; make them all Auto or all Explicit"):
        jpipe.Pipeline([nn.Dense(4)] * 2, lambda y, _: jnp.mean(y), num_stages=2, num_microbatches=1, mesh=mesh)


@pytest.mark.parametrize("explicit", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "names",
    [
        ("tp", "fsdp"),
        pytest.param(("fsdp", "tp"), marks=pytest.mark.slow),
        pytest.param(("tp", None), marks=pytest.mark.slow),
    ],
)
def test_a_table_that_is_split_over_two_axes(make_mesh, names, explicit):
    """A regression (F2): a look-up in such a table aborted the process, in XLA's partitioner."""
    table = nn.with_partitioning(nn.initializers.normal(1.0), (names, None))
    layers = [nn.Embed(16, 8, embedding_init=table), nn.Dense(8), nn.Dense(4)]
    mesh = make_mesh((2, 2, 2), ("stage", "fsdp", "tp"), explicit=explicit)
    ids = np.random.default_rng(0).integers(0, 16, (8, 3)).astype(np.int32)
    against_no_mesh(layers, mesh, ids)


@pytest.mark.parametrize(("axis", "split"), [("data", None), ("model", "model")])
def test_one_stage_and_another_axis(make_mesh, axis, split):
    """A regression (F3): sums over a stage axis of one device failed in the compiler where other axes were its own."""
    kernel = nn.with_partitioning(nn.initializers.lecun_normal(), (None, split))
    mesh = make_mesh((1, 2), ("stage", axis))
    against_no_mesh([nn.Dense(8, kernel_init=kernel), nn.Dense(4)], mesh, np.ones((4, 8), np.float32))


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_a_model_without_parameters_on_an_explicit_mesh(make_mesh, shape):
    """A regression (F8): nothing told the compiler that more than one device takes part."""
    mesh = make_mesh(shape, ("stage", "data")[: len(shape)], explicit=True)
    against_no_mesh([jnp.sin, jnp.tanh], mesh, np.ones((4, 8), np.float32))


def _swapped(a):
    return jax.lax.ppermute(a, "model", [(0, 1), (1, 0)])


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
@pytest.mark.parametrize("sums", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_program_of_single_devices_that_is_manual_over_stages_too(make_mesh, sums):
    """A regression: the transpose summed over `stage`, and the first step waited for other stages for ever."""

    def inside(x, w, add):
        y = jnp.tanh(x @ w)
        return y + add(y.sum(), ("fsdp", "tp")) / 64 if sums else y

    mesh, results = make_mesh((2, 2, 2), ("stage", "fsdp", "tp")), []
    x = np.random.default_rng(0).standard_normal((8, 8))
    with jax.enable_x64(True):
        for own in (mesh, None):
            pipe = jpipe.Pipeline(
                [over_all_axes(own, inside) for _ in range(4)],
                lambda y, _: jnp.mean(jnp.square(y)),
                num_stages=2,
                num_microbatches=2,
                mesh=own,
            )
            variables = pipe.init(jax.random.key(0), x)
            (loss, _), grads = pipe.value_and_grad(variables, x)
            results.append(jax.device_get((loss, pipe.layer_variables({"params": grads}), pipe.apply(variables, x))))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def test_a_program_of_single_devices_can_not_tell_stages_apart(make_mesh):
    mesh = make_mesh((2, 2, 2), ("stage", "fsdp", "tp"))
    inside = lambda x, w, _: x @ w * jax.lax.axis_index("stage").astype(x.dtype)
    layers = [nn.Dense(8), over_all_axes(mesh, inside), nn.Dense(8)]
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=2, num_microbatches=2, mesh=mesh)
    message = r"layer 1 \(Layer\): jax.shard_map holds axis_index over the axes \('stage',\), .*axis_names="
    with pytest.raises(ValueError, match=message):
        pipe.init(jax.random.key(0), np.ones((8, 8), np.float32))


@pytest.mark.filterwarnings("ignore:nothing is split over the mesh axis 'model'")  # by the plain layers
@pytest.mark.parametrize(
    "balance", [*[pytest.param(name, marks=pytest.mark.slow) for name in ("even", "size")], "flops"]
)
def test_a_program_of_single_devices_in_a_layer(make_mesh, balance):
    """`jax.shard_map` in a layer runs as it is; a permutation in it doesn't reach other stages."""
    mesh = make_mesh((2, 2, 2), ("stage", "data", "model"))
    spec = PartitionSpec("data", None, "model")

    def turned(x):
        inside = lambda a: _swapped(a) * (1 + jax.lax.axis_index("model")).astype(a.dtype)
        return jax.shard_map(inside, in_specs=spec, out_specs=spec, axis_names={"data", "model"})(jnp.sin(x))

    def plain(x):
        return jnp.roll(jnp.sin(x), 4, 2) * jnp.repeat(jnp.asarray([1, 2], x.dtype), 4)

    x = np.random.default_rng(0).standard_normal((8, 3, 8)).astype(np.float32)
    results = []
    for layer in (turned, plain):
        pipe = jpipe.Pipeline(
            [nn.Dense(8), layer, nn.Dense(8), layer],
            lambda y, _: jnp.mean(jnp.square(y)),
            num_stages=2,
            num_microbatches=2,
            mesh=mesh,
            balance=balance,
        )
        variables = pipe.init(jax.random.key(0), x)
        (loss, _), grads = pipe.value_and_grad(variables, x)
        results.append(jax.device_get((loss, pipe.layer_variables({"params": grads}), pipe.apply(variables, x))))
    assert_close(*results, "shard_map")


@jax.custom_vjp
def summed_backward(x):
    return x


summed_backward.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.psum(g, "stage"),))


def of_single_devices(function):
    return jax.shard_map(function, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)


stopped = jax.lax.stop_gradient  # a maximum has no derivative
OVER_STAGES = {
    "psum": lambda x: jax.lax.psum(x, "stage"),
    "pmax": lambda x: jax.lax.pmax(x, "stage"),
    "all_gather": lambda x: jax.lax.all_gather(x, "stage", axis=0, tiled=True)[: len(x)],
    "ppermute": lambda x: jax.lax.ppermute(x, "stage", [(0, 1), (1, 0)]),
    "axis_index": lambda x: x * jax.lax.axis_index("stage"),
    "in a branch": lambda x: jax.lax.cond(x.sum() > 0, lambda x: jax.lax.psum(x, "stage"), lambda x: x, x),
    "in a loop": lambda x: jax.lax.fori_loop(0, 2, lambda _, x: jax.lax.psum(x, "stage"), x),
    "in the backward": summed_backward,
    "in a shard_map": lambda x: of_single_devices(lambda x: jax.lax.psum(x, "stage"))(x),
    "gathered in a shard_map": lambda x: of_single_devices(lambda x: jax.lax.all_gather(x, "stage").sum(0))(x),
    "a maximum in a shard_map": lambda x: of_single_devices(lambda x: jax.lax.pmax(x, ("stage", "data")))(stopped(x)),
    "in the backward of a shard_map": lambda x: of_single_devices(summed_backward)(x),
}


@pytest.mark.parametrize("where", ["layer", "loss"])
@pytest.mark.parametrize("name", OVER_STAGES)
def test_a_collective_over_stages_is_refused_before_anything_compiles(make_mesh, name, where):
    """It would wait for stages that run other layers."""
    between = OVER_STAGES[name] if where == "layer" else jnp.tanh
    loss = lambda y, _: jnp.mean(OVER_STAGES[name](y) if where == "loss" else y)
    options = {"num_stages": 2, "num_microbatches": 2, "mesh": make_mesh((2, 2), ("stage", "data"))}
    x = np.ones((4, 8), np.float32)
    with pytest.raises((ValueError, NameError), match="stage"):
        pipe = jpipe.Pipeline([nn.Dense(8), between, nn.Dense(8)], loss, **options)
        jax.eval_shape(pipe.value_and_grad, jax.eval_shape(pipe.init, jax.random.key(0), x), x)


def test_a_constraint_of_more_dimensions_than_the_array_has(make_mesh):
    """Flax makes the kernel of `nn.DenseGeneral` flat, and constrains it by its metadata where it finds a mesh."""

    class Heads(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model", None))
            q = nn.DenseGeneral((2, 4), kernel_init=init)(x)
            return nn.DenseGeneral(8, axis=(-2, -1))(jax.lax.with_sharding_constraint(q, PartitionSpec(None, "model")))

    mesh = make_mesh((2, 2), ("stage", "model"))
    pipe = jpipe.Pipeline([nn.Dense(8), Heads()], lambda y, _: y.mean(), num_stages=2, num_microbatches=2, mesh=mesh)
    says = r"\(Heads\) constrains .* raised ValueError at test_meshes.py:\d+, `q = .*`: .*nn.DenseGeneral makes .* flat"
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(pipe.init, jax.random.key(0), np.ones((4, 8), np.float32))


def test_an_index_along_an_axis_is_refused(make_mesh):
    mesh = make_mesh((2, 2), ("stage", "data"))
    layers = [nn.Dense(4), lambda x: x + jax.lax.axis_index("data").astype(x.dtype)]
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=2, num_microbatches=1, mesh=mesh, balance="even")
    with pytest.raises(ValueError, match=r"layer 1 .*axis_index over the mesh axis 'data': a layer sees whole arrays"):
        pipe.init(jax.random.key(0), np.ones((2, 4), np.float32))


@pytest.mark.parametrize("size", [6, 7, 13])
@pytest.mark.parametrize("shape", [(2, 1), (2, 2)])
def test_evaluation_of_any_batch(make_mesh, shape, size):
    """A regression: `apply` and `evaluate` refused batches that M, or the data axes, don't divide."""
    mesh = make_mesh(shape, ("stage", "data"))
    layers = [nn.Dense(8), nn.tanh, nn.Dense(4)]
    options = {"num_stages": 2, "num_microbatches": 4, "balance": "even", "mesh": mesh}
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(jnp.square(y)), **options)
    x = np.random.default_rng(0).standard_normal((16, 6)).astype(np.float32)
    variables = pipe.init(jax.random.key(0), x)
    first, _, last = pipe.modules(variables)
    expected = last(nn.tanh(first(x[:size])))
    assert_close(pipe.apply(variables, x[:size]), expected, "outputs")
    assert_close(pipe.evaluate(variables, x[:size]), jnp.mean(jnp.square(expected)), "loss")


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)])
def test_metrics_of_the_loss(make_mesh, shape):
    """Sums and weights are added up over micro-batches and devices, and divided once."""
    mesh = make_mesh(shape, ("stage", "data"))

    def loss_fn(y, batch):
        errors, weights = jnp.square(y[:, 0] - batch["y"]), batch["w"]
        hits = jnp.sum(jnp.where(errors < 1, weights, 0))
        return jnp.sum(errors * weights), jnp.sum(weights), {"hits": (hits, jnp.sum(weights)), "largest": jnp.max(y)}

    rng = np.random.default_rng(0)
    batch = {"inputs": rng.standard_normal((16, 6)), "y": rng.standard_normal(16), "w": rng.random(16)}
    batch = {name: a.astype(np.float32) for name, a in batch.items()}
    layers = [nn.Dense(8), nn.tanh, nn.Dense(1)]
    pipe = jpipe.Pipeline(layers, loss_fn, num_stages=2, num_microbatches=4, balance="even", mesh=mesh)
    state = pipe.create_state(jax.random.key(0), batch, optax.sgd(0.1))
    y = pipe.apply(state.variables, batch)[:, 0]
    errors, w = np.square(y - batch["y"]), batch["w"]
    loss, evaluated = np.sum(errors * w) / np.sum(w), pipe.evaluate(state.variables, batch)
    _, metrics = pipe.train_step(state, batch)
    assert set(metrics) == {"loss", "grad_norm", "finite", "hits", "largest"}
    largest = np.mean([np.max(y[i : i + 4]) for i in range(0, 16, 4)])
    for found, expected in (
        (metrics["loss"], loss),
        (evaluated, loss),
        (metrics["hits"], np.sum(w * (errors < 1)) / np.sum(w)),
        (metrics["largest"], largest),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": 1.0}, "a metric called 'loss', as a term or one of jpipe's is"),
        ({"finite": True}, "a metric called 'finite', as a term or one of jpipe's is"),
        ({"a": np.ones(3)}, r"as the metric 'a'; give a scalar"),
        ([1.0], "its last part, metrics, has to be a dict"),
    ],
)
def test_wrong_metrics(metrics, message):
    loss_fn = lambda y, _: (jnp.sum(y), 1.0, jax.tree.map(jnp.asarray, metrics))
    pipe = jpipe.Pipeline([nn.Dense(4)], loss_fn, num_stages=1, num_microbatches=1, balance="even")
    with pytest.raises(ValueError, match=message):
        pipe.init(jax.random.key(0), np.ones((2, 4), np.float32))
