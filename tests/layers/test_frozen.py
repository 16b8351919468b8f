"""Frozen parameters: only read, of whatever layers they are; what is trained beside them equals the plain model's."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import meta

import jpipe
from cases import assert_close, assert_equal

WIDE = jnp.float64
RNG = np.random.default_rng(0)
BATCH = {"inputs": RNG.integers(0, 7, (8, 3)), "targets": RNG.integers(0, 7, (8, 3))}


pytestmark = pytest.mark.usefixtures("float64")


class Adapted(nn.Module):
    """A product with a low-rank change of its weights, one with a mesh axis in its metadata."""

    @nn.compact
    def __call__(self, x):
        split = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "fsdp"))
        w = self.param("kernel", split, (8, 8), WIDE)
        a = self.param("lora_a", nn.initializers.normal(0.3), (8, 2), WIDE)
        b = self.param("lora_b", nn.initializers.normal(0.3), (2, 8), WIDE)
        return x + jnp.tanh(x @ w + x @ a @ b)


class AdaptedNnx(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, param_dtype=WIDE, rngs=rngs)
        self.lora = nnx.Param(0.3 * jax.random.normal(rngs.params(), (8, 2), WIDE))

    def __call__(self, x):
        return x + jnp.tanh(self.dense(x) + x @ self.lora[...] @ self.lora[...].T)


def is_base(path):
    return "lora" not in path


def loss_fn(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def layers():
    table = jpipe.Shared(jpipe.freeze(nn.Embed(7, 8, param_dtype=WIDE)))
    linen, of_nnx = jpipe.freeze(Adapted(), is_base), jpipe.freeze(lambda rngs: AdaptedNnx(rngs), is_base)
    return [table, *[linen] * 2, *[of_nnx] * 2, table.using("attend")]


def plain(trees, batch):
    """The loss of the plain model."""
    table, (graph, state) = nn.Embed(7, 8, param_dtype=WIDE), nnx.split(AdaptedNnx(nnx.Rngs(0)))
    x = table.apply(trees[0], batch["inputs"])
    for tree in trees[1:3]:
        x = Adapted().apply(tree, x)
    for tree in trees[3:5]:
        filled = jax.tree.map(lambda a: a, state)
        nnx.replace_by_pure_dict(filled, tree["params"])
        x = nnx.merge(graph, filled)(x)
    return loss_fn(table.apply(trees[0], x, method="attend"), batch)


def values(tree):
    return meta.unbox(jax.device_get(tree))


def test_what_is_trained_equals_the_plain_models():
    """In chunks, with parameters that are split over a data axis and gathered where they are used."""
    mesh = jpipe.make_mesh(stage=2, fsdp=2, devices=jax.devices()[:4])
    options = {"num_chunks": 2, "schedule": "interleaved", "num_microbatches": 2, "remat": "none", "gather": "use"}
    pipe = jpipe.Pipeline(layers(), loss_fn, num_stages=2, mesh=mesh, **options)
    state = pipe.create_state(jax.random.key(0), BATCH, optax.adam(0.1))
    trained = {(), *(x.shape for x in state.variables["params"].values())}
    assert {leaf.shape for leaf in jax.tree.leaves(state.opt_state)} <= trained
    trees = values(pipe.layer_variables(state.variables))
    (loss, updates), grads = pipe.value_and_grad(state.variables, BATCH)
    expected, wanted = jax.jit(jax.value_and_grad(plain))(trees, BATCH)
    assert_close(loss, expected, "loss")
    found = values(pipe.layer_variables({"params": grads}))
    of_lora = lambda tree: {"params": {name: leaf for name, leaf in tree["params"].items() if "lora" in name}}
    assert_close(found, list(map(of_lora, wanted)), "gradients, of what is trained alone")
    assert_equal(updates["frozen"], state.variables["frozen"], "what is kept, for {'params': ..., **updates}")
    state, metrics = pipe.train_step(state, BATCH)
    assert_close(metrics["grad_norm"], optax.tree.norm(list(map(of_lora, wanted))), "the norm of what is trained")
    after = values(pipe.layer_variables(state.variables))
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(trees), jax.tree.leaves(after), strict=True):
        assert np.array_equal(old, new) is not any("lora" in str(key) for key in path), path


def test_variables_are_those_of_the_layer_inside():
    """As `module.init` gives them; whole trees go back, a wrong name among them is named, and nothing is copied."""
    pipe = jpipe.Pipeline(layers(), loss_fn, num_stages=2, num_microbatches=2)
    variables = pipe.init(jax.random.key(0), BATCH)
    trees, x = pipe.layer_variables(variables), jnp.ones((2, 8))
    assert jax.tree.structure(trees[1]) == jax.tree.structure(Adapted().init(jax.random.key(0), x))
    assert_equal(pipe.from_layer_variables(trees), variables, "there and back")
    assert_close(pipe.modules(variables)[1](x), Adapted().apply(values(trees[1]), x), "bound")
    assert pipe.value_and_grad(variables, BATCH)[0][1]["frozen"] is variables["frozen"]
    trees = values(trees)
    trees[1]["params"]["kernal"] = trees[1]["params"].pop("kernel")
    with pytest.raises(ValueError, match=r"it lacks trees\[1\] .*\['kernel'\] and it has .*\['kernal'\] besides"):
        pipe.from_layer_variables(trees)


def test_a_collection_of_ones_own_is_kept():
    """Also integers, as of quantised weights; without `merge` they would be merged, to the same values."""

    class Quantised(nn.Module):
        @nn.compact
        def __call__(self, x):
            codes = self.variable("codes", "kernel", lambda: jnp.arange(64, dtype=jnp.int8).reshape(8, 8)).value
            return x * self.param("scale", nn.initializers.ones, (8,), WIDE) + x @ codes.astype(WIDE) / 64

    parts = [nn.Dense(8, param_dtype=WIDE), *[Quantised()] * 2, nn.Dense(7, param_dtype=WIDE)]
    batch = {"inputs": np.ones((4, 3)), "targets": np.arange(4)}
    pipe = jpipe.Pipeline(parts, loss_fn, num_stages=2, num_microbatches=2, merge={"codes": "keep"})
    state = pipe.create_state(jax.random.key(0), batch, optax.sgd(1.0))
    old = jax.device_get(state.variables["codes"])
    state, _ = pipe.train_step(state, batch)
    assert_equal(jax.device_get(state.variables["codes"]), old, "codes")


def test_frozen_weights_take_nothing_besides_themselves():
    """In a step of the same layers: no gradients, no sums, no copies of what they are cast to."""

    def temporaries(make):
        parts = [nn.Dense(64), *[make(nn.Dense(64, dtype=jnp.bfloat16))] * 4, nn.Dense(1)]
        batch = {"inputs": jnp.ones((8, 64), jnp.float32), "targets": jnp.zeros(8, jnp.int32)}
        pipe = jpipe.Pipeline(parts, lambda y, b: jnp.mean(y), num_stages=1, num_microbatches=4, remat="none")
        state = pipe.abstract_state(batch, optax.sgd(0.1))
        compiled = jax.jit(pipe.train_step, donate_argnums=0).lower(state, batch).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    kernels = 4 * 64 * 64 * 4
    assert temporaries(jpipe.freeze) <= temporaries(lambda layer: layer) - kernels


class Own(nn.Module):
    """Has a collection `frozen` of its own, to which it may write."""

    writes: bool

    @nn.compact
    def __call__(self, x):
        own = self.variable("frozen", "w", lambda: jnp.ones(3))
        own.value = own.value + 1 if self.writes else own.value
        return x + own.value + self.param("b", nn.initializers.ones, (3,))


def misspelt(path):
    return "kernal" in path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jpipe.freeze(jpipe.Shared(nn.Dense(3))), r"freeze what is in it: jpipe.Shared\(jpipe.freeze"),
        (lambda: jpipe.freeze(jpipe.freeze(nn.Dense(3))), "frozen already; pass one `where`"),
        (lambda: jpipe.freeze(nn.Dense(3), "lora"), "where='lora' is not callable"),
        (lambda: jpipe.freeze(nn.Dense(3), misspelt), r"parameter that `where` of .* names; .* \['bias', 'kernel'\]"),
        (lambda: jpipe.freeze(Own(writes=False)), r"layer 0 \(Own\) has a collection 'frozen' of its own"),
        # A regression: a collection of that name of one's own was kept as it was, without a word.
        (lambda: Own(writes=True), r"writes to its collection 'frozen' in training, .* keeps; rename it"),
    ],
)
def test_what_cannot_be_frozen(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        pipe = jpipe.Pipeline([make()], lambda y, b: jnp.mean(y), num_stages=1, num_microbatches=1)
        pipe.init(jax.random.key(0), jnp.ones((2, 3)))


def stepped(layers, **options):
    """A pipeline and its variables, of which the gradients were computed."""
    pipe = jpipe.Pipeline(layers, lambda y, b: jnp.mean(y), num_stages=2, num_microbatches=1, **options)
    variables = pipe.init(jax.random.key(0), jnp.ones((2, 3)))
    pipe.value_and_grad(variables, jnp.ones((2, 3)))
    return pipe, variables


def test_empty_places_among_the_parameters_stay():
    """Of plain functions, which may ask for them."""

    def apply(params, x):
        assert params["norm"] == {} and params["b"] is None
        return x @ params["w"]

    layer = jpipe.Layer(lambda key, x: {"w": jnp.ones((3, 3)), "norm": {}, "b": None}, apply)
    pipe, variables = stepped([jpipe.freeze(layer), nn.Dense(2)])
    assert pipe.layer_variables(variables)[0].keys() == {"w", "norm", "b"}


def test_shared_bools_stay_bools():
    class Masked(nn.Module):
        @nn.compact
        def __call__(self, x):
            mask = self.variable("masks", "of", lambda: jnp.asarray([True, False, True])).value
            return jnp.where(mask, x, nn.Dense(3)(x))

    stepped([jpipe.Shared(Masked())] * 2, merge={"masks": "keep"})


@pytest.mark.parametrize("layer", [Adapted(), pytest.param(lambda rngs: AdaptedNnx(rngs), marks=pytest.mark.slow)])
def test_a_checkpoint_has_all(layer, tmp_path):
    """Saving once failed where some of a layer's parameters are frozen."""
    layers = [nn.Embed(7, 8, param_dtype=WIDE), *[jpipe.freeze(layer, is_base)] * 2, nn.Dense(7, param_dtype=WIDE)]
    loss_fn = lambda y, batch: optax.softmax_cross_entropy_with_integer_labels(y, batch["targets"]).mean()
    pipes = [jpipe.Pipeline(layers, loss_fn, num_stages=k, num_microbatches=2, balance="even") for k in (2, 1)]
    state, _ = pipes[0].train_step(pipes[0].create_state(jax.random.key(0), BATCH, optax.adam(0.1)), BATCH)
    with jpipe.Checkpointer(tmp_path) as saved:
        saved.save(pipes[0], state)
        saved.wait()
        again, _ = saved.restore(pipes[1], BATCH, optax.adam(0.1))
    trees = [pipe.layer_variables(s.variables) for pipe, s in zip(pipes, (state, again), strict=True)]
    assert_equal(*map(jax.device_get, trees))


class Normed(nn.Module):
    """BatchNorm, told by jpipe whether it trains, or fixed to its averages."""

    fixed: bool | None = None

    @nn.compact
    def __call__(self, x, train: bool = False):
        use = not train if self.fixed is None else self.fixed
        return jnp.tanh(nn.BatchNorm(use_running_average=use, momentum=0.9, param_dtype=WIDE, dtype=WIDE)(x))


@pytest.mark.parametrize(
    ("fixed", "rules", "moves"),
    [
        pytest.param(None, {}, True, id="as it is"),
        pytest.param(None, {"batch_stats": "keep"}, False, id="kept", marks=pytest.mark.slow),
        pytest.param(True, {}, False, id="fixed"),
    ],
)
def test_running_averages_of_a_frozen_layer(fixed, rules, moves):
    """They move as in plain Flax; kept, evaluation has the old ones, and training still the micro-batch's own.

    Flax keeps averages in float32 and takes their root there. Its last bit depends on what is compiled together, so the
    plain model is compiled, too.
    """
    batch = {"inputs": 3 + RNG.standard_normal((8, 4)), "targets": RNG.integers(0, 4, 8)}
    norm, head = Normed(fixed), nn.Dense(4, param_dtype=WIDE)
    evaluate = jax.jit(lambda tree, head_tree: head.apply(head_tree, norm.apply(tree, batch["inputs"])))
    pipe = jpipe.Pipeline([jpipe.freeze(norm), head], loss_fn, num_stages=2, num_microbatches=2, merge=rules)
    state = pipe.create_state(jax.random.key(0), batch, optax.sgd(0.1))
    trees = jax.device_get(pipe.layer_variables(state.variables))

    def plain(head_tree):  # the mean over micro-batches, each with its own statistics
        h = [norm.apply(trees[0], batch["inputs"][i : i + 4], train=True, mutable="batch_stats")[0] for i in (0, 4)]
        return loss_fn(head.apply(head_tree, jnp.concatenate(h)), batch)

    expected, wanted = jax.jit(jax.value_and_grad(plain))(trees[1])
    (loss, _), grads = pipe.value_and_grad(state.variables, batch)
    assert_close(loss, expected, "loss")
    assert_close(jax.device_get(pipe.layer_variables({"params": grads}))[1], wanted, "gradients")
    state, _ = pipe.train_step(state, batch)
    after = jax.device_get(pipe.layer_variables(state.variables))
    assert_equal(after[0]["params"], trees[0]["params"], "scale and bias")
    # Over the whole mini-batch, as plain Flax's layer moves them.
    moved = norm.apply(trees[0], batch["inputs"], train=True, mutable="batch_stats")[1] if moves else trees[0]
    narrow = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), moved["batch_stats"])  # as Flax keeps them
    assert_close(after[0]["batch_stats"], narrow, "averages")
    evaluated = evaluate(after[0] if moves else trees[0], after[1])
    assert_close(pipe.apply(state.variables, batch), evaluated, "evaluation")
