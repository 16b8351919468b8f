"""`per_layer`: a transformation sees each layer's own tree, of a model that is one module the plain model's own."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import jpipe
import whole_models
from cases import assert_close, model, pipeline
from updates import check_updates, is_kernel, is_matrix, labels, one_by_one, params

KEY = jax.random.key(3)


@pytest.fixture(scope="module", autouse=True)
def float64():
    """Optax itself mixes dtypes."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


BY_PARAMETER = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.5),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1, mask=is_matrix),
    "masked by path": lambda: optax.masked(optax.adamw(1e-2), is_kernel),
    "multi_transform": lambda: optax.multi_transform({"matrices": optax.adamw(1e-2), "rest": optax.sgd(0.1)}, labels),
}


@pytest.fixture(scope="module")
def pipe():
    with jax.enable_x64(True):
        truth = model("mixed")
        return pipeline(truth, "1f1b", 3, 4, balance="even")


@pytest.mark.parametrize(
    "tx",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "adafactor")) for name in BY_PARAMETER],
)
def test_per_layer_shows_each_layer_its_own_tree(pipe, tx):
    check_updates(pipe, jpipe.per_layer(BY_PARAMETER[tx]()), one_by_one(BY_PARAMETER[tx]()))


def test_elementwise_transformations_need_nothing(pipe):
    check_updates(pipe, *(optax.adamw(1e-2, weight_decay=0.1) for _ in range(2)))


def test_per_layer_passes_extra_arguments_on(pipe):
    update = lambda updates, state, params=None, *, factor: (jax.tree.map(lambda u: u * factor, updates), state)
    truth = model("mixed")
    variables = pipe.from_layer_variables(truth.trees, truth.batch)["params"]
    tx = jpipe.per_layer(optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update))
    doubled, _ = tx.update(variables, tx.init(variables), factor=jnp.asarray(2.0))
    found = pipe.layer_variables({"params": doubled})
    jax.tree.map(lambda got, want: np.testing.assert_array_equal(got, 2 * want), list(found), params(truth))


# --- a model that is one module ---------------------------------------------------------------------------------------


def by_path(function):
    return lambda params: jax.tree_util.tree_map_with_path(lambda p, _: function(jax.tree_util.keystr(p)), params)


def rate_of(path):
    """Other rates by block, and a block that isn't trained."""
    return {"1": "slow", "0": "none"}.get(path.partition("h_")[2][:1], "fast")


RATES = {"slow": optax.adamw(1e-3), "fast": optax.sgd(1e-1, 0.9), "none": optax.set_to_zero()}
TX = {
    "masked by path": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=by_path(lambda path: "kernel" in path)),
    "rates by block": lambda: optax.multi_transform(RATES, by_path(rate_of)),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1, mask=by_path(lambda path: "bias" not in path)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.5),
    "muon": lambda: optax.contrib.muon(1e-2, weight_decay=0.1),
    "novograd": lambda: optax.novograd(1e-2, weight_decay=0.1),
}
PIPES = {
    "1f1b": {"num_stages": 2},
    "spread": {"num_stages": 2, "num_chunks": 2, "schedule": "v", "ends": "spread"},
    "three stages": {"num_stages": 3},
    "model": {"num_stages": 2, "mesh": ((2, 2), ("stage", "model"))},
}


def made(model):
    batch = whole_models.tokens("inputs", "targets")
    return batch, nn.unbox(dict(jax.jit(model.init)(jax.random.key(0), batch["inputs"])))


def drawn(tree):
    """Gradients, not those of a model: each update is compared, so any will do."""
    random = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: random.normal(size=leaf.shape), tree)


@pytest.mark.parametrize(
    ("tx", "options"),
    [
        case if case == ("rates by block", "model") else pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(TX, PIPES)
    ],
)
def test_equals_the_transformation_of_the_plain_tree(tx, options, make_mesh):
    more = dict(PIPES[options])
    more |= {"mesh": make_mesh(*more["mesh"])} if "mesh" in more else {}
    module, plain = whole_models.Transformer(tied=options == "spread"), TX[tx]()
    pipe = jpipe.Pipeline(module, whole_models.cross_entropy, num_microbatches=4, **more)
    batch, variables = made(module)
    tree, ours = variables["params"], jpipe.per_layer(plain)
    placed = pipe.from_model_variables(variables, batch)["params"]
    state, expected_state = jax.jit(ours.init)(placed), jax.jit(plain.init)(tree)
    pipe.abstract_state(batch, ours)
    for _ in range(2):
        gradients = drawn(tree)
        updates, expected_state = jax.jit(plain.update)(gradients, expected_state, tree)
        tree = optax.apply_updates(tree, updates)
        own = pipe.from_model_variables({"params": gradients})["params"]
        changes, state = jax.jit(ours.update)(own, state, placed)
        placed = optax.apply_updates(placed, changes)
    found = pipe.model_variables({"params": placed})["params"]
    assert_close(nn.unbox(found), tree)


def test_slices_of_a_scan_are_parameters_of_their_own():
    """The trust ratio is that of each block's kernel, as with blocks one by one."""
    batch, variables = made(whole_models.Transformer())

    def stacked(tree):
        blocks = [tree[f"h_{i}"] for i in range(3)]
        rest = {name: own for name, own in tree.items() if not name.startswith("h_")}
        return rest | {"blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}

    module = whole_models.Transformer(style="scan")
    pipe = jpipe.Pipeline(module, whole_models.cross_entropy, num_stages=2, num_microbatches=4)
    placed = pipe.from_model_variables({"params": stacked(variables["params"])}, batch)["params"]
    tx = optax.lamb(1e-2, weight_decay=0.1)
    update = lambda tx, tree: jax.jit(lambda tree: tx.update(tree, tx.init(tree), tree)[0])(tree)
    found = nn.unbox(pipe.model_variables({"params": update(jpipe.per_layer(tx), placed)})["params"])
    assert_close(found, stacked(update(tx, variables["params"])))


def test_labels_may_be_a_tree_and_counts_are_those_of_the_plain_state():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, param_dtype=x.dtype)(jnp.tanh(nn.Dense(4, param_dtype=x.dtype)(x)))

    batch = np.ones((4, 4))
    pipe = jpipe.Pipeline(Two(), lambda y, _: (y**2).mean(), num_stages=2, num_microbatches=2)
    tree = {"Dense_0": {"kernel": "a", "bias": "b"}, "Dense_1": {"kernel": "b", "bias": "b"}}
    tx = jpipe.per_layer(optax.multi_transform({"a": optax.adam(1e-2), "b": optax.sgd(0.1)}, tree))
    state, _ = pipe.train_step(pipe.create_state(KEY, batch, tx), batch)
    assert state.opt_state.shared["inner_states"]["a"]["inner_state"]["0"]["count"] == 1
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state.own))
    assert held == 2 * 2 * 16 * 8  # two stages have room for the two moments of a kernel

    with pytest.raises(TypeError, match=r"^jpipe.per_layer: the update of Dense_./.* follows from .* outside: optax"):
        pipe.abstract_state(batch, jpipe.per_layer(optax.clip_by_global_norm(1.0)))
    message = r"(?m)what it keeps for all parameters follows from Dense_0/bias too; .*\(jpipe.per_layer\(...\), 5\)$"
    with pytest.raises(TypeError, match=message):  # a regression: something of the loss stood behind it
        pipe.abstract_state(batch, jpipe.per_layer(optax.apply_if_finite(optax.sgd(0.1), 3)))


@pytest.mark.parametrize("kind", ["list", "module"])
def test_a_mistake_within_the_transformation_is_told_as_it_is(kind):
    """A regression: the remedy was to wrap it in `jpipe.per_layer`."""

    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return layers[1].copy()(layers[0].copy()(x))

    layers = [nn.Dense(4, param_dtype=jnp.float64) for _ in range(2)]
    model = layers if kind == "list" else Two()
    pipe = jpipe.Pipeline(model, lambda y, _: (y**2).mean(), num_stages=2, num_microbatches=2)
    wrong = optax.GradientTransformation(lambda params: len(3), lambda g, s, p=None: (g, s))
    message = r"(?m)^jpipe.per_layer: tx.init raised TypeError: object of type 'int' has no len\(\)$"
    with pytest.raises(TypeError, match=message):
        pipe.abstract_state(np.ones((4, 4)), optax.chain(optax.scale(0.1), jpipe.per_layer(wrong)))


# --- several optimisers -----------------------------------------------------------------------------------------------


Dense = functools.partial(nn.Dense, param_dtype=jnp.float64)


class Network(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(Dense(6)(x))
        return Dense(self.width)(x + nn.tanh(Dense(6)(x)))


class Gan(nn.Module):
    @nn.compact
    def __call__(self, noise, real):
        made = Network(4, name="generator")(noise)
        return Network(1, name="critic")(jnp.stack([real, made], axis=1))[..., 0]


GAN = {
    "critic": (lambda y, _: nn.softplus(-y[:, 0]).mean() + nn.softplus(y[:, 1]).mean(), optax.adam(1e-2)),
    "generator": (lambda y, _: nn.softplus(-y[:, 1]).mean(), optax.sgd(0.3, momentum=0.9)),
}
"""For each network its loss, and its optimiser."""


def test_networks_that_train_in_turns():
    """docs/howto/optimizers.md: two pipelines of one model pass the variables on, each updates one network."""
    rng = np.random.default_rng(0)
    batches = [{"noise": rng.normal(size=(4, 3)), "real": rng.normal(size=(4, 4))} for _ in range(2)]
    inputs, pipes, states = lambda batch: (batch["noise"], batch["real"]), {}, {}
    for network, (loss, tx) in GAN.items():
        pipes[network] = jpipe.Pipeline(Gan(), loss, num_stages=2, num_microbatches=2, inputs=inputs)
        labels = {name: name == network for name in GAN}
        own = jpipe.per_layer(optax.multi_transform({True: tx, False: optax.set_to_zero()}, labels))
        states[network] = pipes[network].create_state(KEY, batches[0], own)
    variables = states["generator"].variables
    params = jax.device_get(pipes["critic"].model_variables(variables))["params"]
    opt_states = {network: tx.init(params[network]) for network, (_, tx) in GAN.items()}

    @functools.partial(jax.jit, static_argnums=0)
    def plainly(network, params, opt_state, batch):
        """One turn by JAX and optax: (the loss, the parameters and the optimiser's state after it)."""
        loss, tx = GAN[network]
        apply = lambda own: Gan().apply({"params": {**params, network: own}}, *inputs(batch))
        wanted, grads = jax.value_and_grad(lambda own: loss(apply(own), batch))(params[network])
        updates, opt_state = tx.update(grads, opt_state, params[network])
        return wanted, {**params, network: optax.apply_updates(params[network], updates)}, opt_state

    for batch, network in itertools.product(batches, GAN):
        states[network], metrics = pipes[network].train_step(states[network].replace(variables=variables), batch)
        variables = states[network].variables
        wanted, params, opt_states[network] = plainly(network, params, opt_states[network], batch)
        assert_close(metrics["loss"], wanted)
    assert_close(pipes["generator"].model_variables(variables)["params"], params)


class Routed(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(4):
            x = RoutedBlock(name=f"h_{i}")(x)
        return x


class RoutedBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        weights = nn.softmax(Dense(2, name="router")(x))
        return x + sum(weights[:, i : i + 1] * nn.tanh(Dense(4, name=f"expert_{i}")(x)) for i in range(2))


@pytest.mark.slow
@pytest.mark.parametrize("as_list", [False, True])
def test_a_router_with_an_optimiser_of_its_own(as_list):
    x, square = np.random.default_rng(0).normal(size=(8, 4)), lambda y, batch: (y**2).mean()
    label = lambda path, _: "router" if any(part.key == "router" for part in path) else "rest"
    labels = lambda params: jax.tree_util.tree_map_with_path(label, params)
    tx = optax.multi_transform({"router": optax.sgd(0.5, momentum=0.9), "rest": optax.adamw(1e-2)}, labels)
    layers = [RoutedBlock() for _ in range(4)]
    pipe = jpipe.Pipeline(layers if as_list else Routed(), square, num_stages=2, num_microbatches=4)
    state = pipe.create_state(KEY, x, jpipe.per_layer(tx))

    def tree(variables):
        trees = [one["params"] for one in pipe.layer_variables(variables)] if as_list else []
        return {f"h_{i}": own for i, own in enumerate(trees)} if as_list else pipe.model_variables(variables)["params"]

    params = jax.device_get(tree(state.variables))
    opt_state, start = tx.init(params), params

    @jax.jit
    def plainly(params, opt_state):
        grads = jax.grad(lambda params: square(Routed().apply({"params": params}, x), x))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for _ in range(3):
        params, opt_state = plainly(params, opt_state)
        state, _ = pipe.train_step(state, x)
    assert_close(tree(state.variables), params)
    assert np.abs(params["h_0"]["router"]["kernel"] - start["h_0"]["router"]["kernel"]).max() > 1e-3
