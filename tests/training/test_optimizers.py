"""Optimisers: any optax transformation does to the stages' buffers what it does to the sequential model's tree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jpipe
from cases import Model, assert_close, model, params_of, pipeline, run_layers, take_microbatch, tokens


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax itself mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def is_kernel(tree):
    return jax.tree_util.tree_map_with_path(lambda path, _: "kernel" in jax.tree_util.keystr(path), tree)


def is_matrix(tree):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


def labels(tree):
    return jax.tree.map(lambda leaf: "matrices" if leaf.ndim > 1 else "rest", tree)


def params(truth: Model) -> list:
    return [params_of(layer, tree) for layer, tree in zip(truth.sequence, truth.trees, strict=True)]


def filled(truth: Model, trees: list) -> list:
    """Variables of the sequential model with other parameters."""
    pairs = zip(truth.trees, trees, strict=True)
    return [old | tree if isinstance(old, dict) and "params" in old else tree for old, tree in pairs]


# --- five steps -------------------------------------------------------------------------------------------------------

SCHEDULE = functools.partial(optax.warmup_cosine_decay_schedule, 0.0, 0.03, 2, 6)


def chain(inner):
    return optax.chain(optax.clip_by_global_norm(0.05), inner)


@pytest.mark.parametrize(
    ("kind", "order", "k", "m", "v", "remat", "mask"),
    [
        ("linen", "1f1b", 4, 3, 1, "layer", is_matrix),
        pytest.param("nn.Sequential", "interleaved", 2, 4, 2, "none", is_kernel, marks=pytest.mark.slow),
        pytest.param("alternating", "gpipe", 3, 4, 1, "full", is_kernel, marks=pytest.mark.slow),
    ],
)
def test_five_steps_equal_the_sequential_ones(kind, order, k, m, v, remat, mask):
    with jax.enable_x64(True):
        truth = model(kind)
        batches = [truth.batch | {"targets": tokens(seed=seed)["targets"]} for seed in range(5)]
        adamw = lambda: optax.adamw(SCHEDULE(), weight_decay=0.1, mask=mask)

        pipe = pipeline(truth, order, k, m, v, remat=remat)
        state = pipe.create_state(jax.random.key(0), truth.batch, chain(jpipe.per_layer(adamw())))
        state = state.replace(variables=pipe.from_layer_variables(truth.trees))

        tx, trees = chain(adamw()), params(truth)
        opt_state = tx.init(trees)

        @jax.jit
        def step(trees, opt_state, batch):
            loss, grads = jax.value_and_grad(lambda t: truth.loss_of(filled(truth, t), batch))(trees)
            updates, opt_state = tx.update(grads, opt_state, trees)
            return optax.apply_updates(trees, updates), opt_state, loss, optax.tree.norm(grads)

        for number, batch in enumerate(batches):
            trees, opt_state, loss, norm = step(trees, opt_state, batch)
            state, metrics = pipe.train_step(state, batch)
            assert_close(metrics["loss"], loss, f"loss of step {number}")
            assert_close(metrics["grad_norm"], norm, f"gradient norm of step {number}")
            assert norm > 0.05, "the norm has to be clipped for this to show anything"
        assert int(state.step) == 5
        assert_close(pipe.layer_variables({"params": state.variables["params"]}), trees, "parameters")


# --- single updates ---------------------------------------------------------------------------------------------------

ELEMENTWISE = {
    "sgd with momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "global norm": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.scale(-1.0)),
    "accumulation": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2).gradient_transformation(),
}
BY_PARAMETER = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.5),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1, mask=is_matrix),
    "lars": lambda: optax.lars(1e-2, weight_decay=0.1),
    "masked by path": lambda: optax.masked(optax.adamw(1e-2), is_kernel),
    "multi_transform": lambda: optax.multi_transform({"matrices": optax.adamw(1e-2), "rest": optax.sgd(0.1)}, labels),
    "clipped by block": lambda: optax.chain(optax.clip_by_block_rms(0.01), optax.add_decayed_weights(0.1, is_matrix)),
}


@pytest.fixture(scope="module")
def pipe():
    with jax.enable_x64(True):
        truth = model("mixed")
        return pipeline(truth, "1f1b", 3, 4, balance="even")


def random_like(trees: list, seed: int) -> list:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: rng.standard_normal(a.shape).astype(a.dtype), trees)


def check_updates(pipe, found, expected):
    """Two updates under both transformations, from the same parameters and gradients."""
    truth = model("mixed")
    trees, variables = params(truth), pipe.from_layer_variables(truth.trees, truth.batch)["params"]
    state, found_state = jax.jit(expected.init)(trees), jax.jit(found.init)(variables)
    expected_update, update = jax.jit(expected.update), jax.jit(found.update)
    for seed in range(2):
        grads = random_like(trees, seed)
        laid_out = pipe.from_layer_variables(filled(truth, grads))["params"]
        updates, state = expected_update(grads, state, trees)
        changes, found_state = update(laid_out, found_state, variables)
        assert_close(pipe.layer_variables({"params": changes}), updates, f"update {seed}")
        trees, variables = jax.jit(optax.apply_updates)((trees, variables), (updates, changes))


@pytest.mark.parametrize("tx", ELEMENTWISE)
def test_elementwise_transformations_need_nothing(pipe, tx):
    with jax.enable_x64(True):
        check_updates(pipe, ELEMENTWISE[tx](), ELEMENTWISE[tx]())


@pytest.mark.parametrize("tx", BY_PARAMETER)
def test_per_layer_shows_each_layer_its_own_tree(pipe, tx):
    with jax.enable_x64(True):
        check_updates(pipe, jpipe.per_layer(BY_PARAMETER[tx]()), one_by_one(BY_PARAMETER[tx]()))


def one_by_one(tx):
    """The transformation applied to the tree of each layer."""

    def update(grads, state, trees):
        pairs = [tx.update(*given) for given in zip(grads, state, trees, strict=True)]
        return [update for update, _ in pairs], [state for _, state in pairs]

    return optax.GradientTransformation(lambda trees: [tx.init(tree) for tree in trees], update)


def test_per_layer_passes_extra_arguments_on(pipe):
    def update(updates, state, params=None, *, factor):
        return jax.tree.map(lambda u: u * factor, updates), state

    with jax.enable_x64(True):
        truth = model("mixed")
        variables = pipe.from_layer_variables(truth.trees, truth.batch)["params"]
        tx = jpipe.per_layer(optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update))
        doubled, _ = tx.update(variables, tx.init(variables), factor=jnp.asarray(2.0))
        found = pipe.layer_variables({"params": doubled})
    for tree, expected in zip(found, params(truth), strict=True):
        for leaf, want in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(leaf, 2 * want)


def test_a_transformation_that_sees_stacked_layers_differs():
    """Why `per_layer` is there: the norm of a stack of parameters is not the norm of one."""
    with jax.enable_x64(True):
        truth = model("plain")
        pipe = pipeline(truth, "1f1b", 2, 3, balance="even")
        with pytest.raises(AssertionError):
            check_updates_of(truth, pipe, optax.lars(1e-2), one_by_one(optax.lars(1e-2)))
        check_updates_of(truth, pipe, jpipe.per_layer(optax.lars(1e-2)), one_by_one(optax.lars(1e-2)))


def check_updates_of(truth, pipe, found, expected):
    trees, variables = params(truth), pipe.from_layer_variables(truth.trees, truth.batch)["params"]
    grads = random_like(trees, 0)
    laid_out = pipe.from_layer_variables(filled(truth, grads))["params"]
    updates, _ = jax.jit(expected.update)(grads, expected.init(trees), trees)
    changes, _ = jax.jit(found.update)(laid_out, found.init(variables), variables)
    assert_close(pipe.layer_variables({"params": changes}), updates, "update")


def test_a_transformation_that_takes_no_loss():
    """A regression: sharpness-aware minimisation was given `value`, which it doesn't take, and failed in the step."""
    truth = model("plain", "float32")
    pipe = pipeline(truth, "1f1b", 2, 3, balance="even")
    tx = optax.contrib.sam(optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)))
    state = pipe.create_state(jax.random.key(0), truth.batch, tx)
    losses = []
    for _ in range(6):
        state, metrics = pipe.train_step(state, truth.batch)
        losses.append(float(metrics["loss"]))
    assert losses[-2] < losses[0]


# --- where the state lies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(1e-3),
        chain(jpipe.per_layer(optax.adamw(1e-3, mask=is_matrix))),
        jpipe.per_layer(optax.adafactor(1e-3, min_dim_size_to_factor=4)),
        jpipe.per_layer(optax.multi_transform({"matrices": optax.adamw(1e-2), "rest": optax.sgd(0.1, 0.9)}, labels)),
        optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    ],
    ids=["adamw", "chain", "adafactor", "multi_transform", "MultiSteps"],
)
def test_state_lies_with_its_layers(tx):
    truth = model("mixed", "float32")
    pipe = pipeline(truth, "1f1b", 4, 3, balance="even")
    tx = tx if isinstance(tx, optax.GradientTransformation) else tx.gradient_transformation()
    state = pipe.create_state(jax.random.key(0), truth.batch, tx)
    split = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path((state.variables, state.opt_state)):
        name = jax.tree_util.keystr(path)
        assert len(leaf.sharding.device_set) == 4, name
        if leaf.ndim > 0:
            assert leaf.shape[0] == 4, name
            assert leaf.sharding.spec[0] == "stage", f"{name} is on all stages"
            assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {1}, name
            split += 1
    assert split >= 2
    for leaf in (state.step, state.key):
        assert leaf.sharding.spec == PartitionSpec()
    expected = pipe.abstract_state(truth.batch, tx)
    assert jax.tree.structure(expected) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(state), strict=True):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)


# --- precision --------------------------------------------------------------------------------------------------------


def test_gradients_of_bfloat16_parameters_accumulate_in_float32():
    """In bfloat16, 256 + 0.5 = 256: micro-batches after the first would be lost."""
    size = 9
    steps = np.where(np.arange(size) == 0, 256.0, 0.5).astype(np.float32)
    batch = {"inputs": np.ones((size, 4), np.float32) * steps[:, None]}
    weight = jpipe.Layer(lambda key, x: jnp.ones(4, jnp.bfloat16), lambda w, x: x.astype(jnp.bfloat16) * w, name="w")
    layers = [weight, weight, lambda y: y]
    loss = lambda y, _: (jnp.sum(y.astype(jnp.float32)), 1 / size)
    pipe = jpipe.Pipeline(layers, loss, num_stages=2, num_microbatches=size, balance="even")
    (_, _), grads = pipe.value_and_grad(pipe.init(jax.random.key(0), batch), batch)
    for tree in pipe.layer_variables({"params": grads})[:2]:
        assert tree.dtype == jnp.bfloat16
        np.testing.assert_array_equal(tree.astype(np.float32), np.full(4, 256 + 0.5 * (size - 1), np.float32))
    low = functools.reduce(lambda a, b: a + b, [jnp.asarray(step, jnp.bfloat16) for step in steps])
    assert float(low) == 256.0, "accumulated in bfloat16"


def test_loss_of_a_bfloat16_model_accumulates_in_float32():
    size = 8
    values = np.where(np.arange(size) == 0, 256.0, 0.5).astype(np.float32)
    layers = [lambda x: x.astype(jnp.bfloat16), lambda x: x]
    pipe = jpipe.Pipeline(
        layers, lambda y, _: (jnp.sum(y), jnp.ones((), y.dtype)), num_stages=2, num_microbatches=size, balance="even"
    )
    batch = {"inputs": values[:, None]}
    loss = pipe.evaluate(pipe.init(jax.random.key(0), batch), batch)
    assert loss.dtype == jnp.float32
    assert float(loss) == (256 + 0.5 * (size - 1)) / size


def test_bfloat16_gradients_equal_the_float32_sum_of_those_of_the_micro_batches():
    truth, m = model("plain", "bfloat16"), 6
    pipe = pipeline(truth, "1f1b", 3, m)
    (_, _), grads = pipe.value_and_grad(pipe.from_layer_variables(truth.trees, truth.batch), truth.batch)
    loss_sum = lambda trees, batch: truth.loss_fn(run_layers(truth.sequence, trees, batch["inputs"]), batch)
    grad = jax.jit(jax.grad(loss_sum, has_aux=True))
    parts = [grad(truth.trees, take_microbatch(truth.batch, i, m)) for i in range(m)]
    weight = sum(np.float32(w) for _, w in parts)
    expected = jax.tree.map(lambda *g: sum(a.astype(np.float32) for a in g) / weight, *[g for g, _ in parts])
    found = pipe.layer_variables({"params": grads})
    for (path, got), want in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert got.dtype == jnp.bfloat16
        # one rounding of the result, and those inside of the layers, which fusion may leave out
        got, largest = np.asarray(got, np.float32), np.max(np.abs(want))
        np.testing.assert_allclose(got, want, rtol=2**-8, atol=2**-8 * largest, err_msg=jax.tree_util.keystr(path))
