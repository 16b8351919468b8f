"""Skips, side inputs and the first layer's own: exact under every cut, and clear errors for pairs that don't match."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jpipe
from cases import CUTS, assert_close, cut, some_slow
from jpipe.layers.adapt import as_layers
from jpipe.layers.base import Context, is_same
from jpipe.layers.connections import with_inputs
from jpipe.model.trace import trace_model

RNG = np.random.default_rng(0)
BATCH = {
    "inputs": RNG.normal(size=(8, 5)).astype(np.float32),
    "targets": RNG.normal(size=(8, 3)).astype(np.float32),
    "mask": (RNG.random(8) > 0.3).astype(np.float32),
}


class Add(nn.Module):
    """Takes what the layer before gives and a skip."""

    @nn.compact
    def __call__(self, x, kept):
        return nn.Dense(x.shape[-1])(x) + kept


class Masked(nn.Module):
    """Takes a side input."""

    @nn.compact
    def __call__(self, x, mask):
        return nn.tanh(nn.Dense(x.shape[-1])(x)) * mask[..., None]


PLAIN = [nn.Dense(8), nn.Dense(12), Masked(), nn.Dense(8), nn.Dense(12), Add(), nn.Dense(8), Add(), nn.Dense(3)]


def connected():
    layers = list(PLAIN)
    layers[1] = jpipe.stash(layers[1], "a")
    layers[2] = jpipe.reads(layers[2], lambda batch: batch["mask"])
    layers[3] = jpipe.stash(layers[3], "b")
    layers[5] = jpipe.pop(layers[5], "a")
    layers[7] = jpipe.pop(layers[7], "b")
    return layers


def loss_fn(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def sequential(trees):
    x, skips, extra = BATCH["inputs"], {}, {2: BATCH["mask"]}
    for i, (layer, tree) in enumerate(zip(PLAIN, trees, strict=True)):
        more = {5: ["a"], 7: ["b"]}.get(i, [])
        x = layer.apply(tree, x, *([extra[i]] if i in extra else []), *[skips[name] for name in more])
        if i in (1, 3):
            skips["ab"[i // 3]] = x
    return loss_fn(x, BATCH)


def check(pipe, by_hand):
    """Loss, every gradient and evaluation are those of `by_hand(trees of the layers)`."""
    variables = pipe.init(jax.random.key(0), BATCH)
    trees = jax.device_get(pipe.layer_variables(variables))
    expected, gradients = jax.jit(jax.value_and_grad(by_hand))(trees)
    (loss, _), grads = pipe.value_and_grad(variables, BATCH)
    assert_close(loss, expected, "loss")
    assert_close(pipe.layer_variables({"params": grads}), gradients, "gradients")
    assert_close(pipe.evaluate(variables, BATCH), expected, "evaluation")


@pytest.mark.parametrize("case", some_slow(CUTS), ids=str)
def test_equal_to_the_sequential_model(case):
    check(cut(connected(), loss_fn, case), sequential)


@pytest.mark.parametrize("counts", [[3], [1, 2], [2, 1], [1, 1, 1]])
def test_a_skip_under_every_cut(counts):
    layers = [jpipe.stash(nn.Dense(4), "x"), nn.Dense(4), jpipe.pop(Add(), "x")]
    sizes = {"num_stages": len(counts), "num_microbatches": 2}
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), **sizes, balance=counts)
    variables = pipe.init(jax.random.key(0), BATCH["inputs"])

    def plain(trees):
        skip = nn.Dense(4).apply(trees[0], BATCH["inputs"])
        return jnp.mean(Add().apply(trees[2], nn.Dense(4).apply(trees[1], skip), skip) ** 2)

    trees = jax.device_get(pipe.layer_variables(variables))
    _, grads = pipe.value_and_grad(variables, BATCH["inputs"])
    assert_close(pipe.layer_variables({"params": grads}), jax.jit(jax.grad(plain))(trees), "gradients")


class Join(nn.Module):
    """Takes a pair, as two arguments."""

    @nn.compact
    def __call__(self, x, count):
        return nn.Dense(6)(x) + count


class Mix(nnx.Module):
    """Takes what it popped and read, in this order; what it popped is a pair."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(6, 6, rngs=rngs)

    def __call__(self, x, kept, mask):
        values, count = kept
        return self.dense(x) * values + count * mask[:, None]


SCALE = jpipe.Layer(lambda key, x, kept: jnp.full(x.shape[-1], 0.5, jnp.float32), lambda w, x, kept: w * x - kept)


def count(x):
    return x, jnp.sign(x).astype(jnp.int32)


def all_sorts():
    """Skips of tuples and integers; a layer that pops and stashes, one that pops and reads; all sorts of layers."""
    return [
        jpipe.stash(nn.Dense(6), "a"),
        jpipe.stash(count, "pair"),
        Join(),
        jpipe.stash(jpipe.pop(Add(), "a"), "b"),
        jpipe.reads(jpipe.pop(lambda rngs: Mix(rngs), "pair"), lambda batch: batch["mask"]),
        jpipe.pop(SCALE, "b"),
    ]


def all_sorts_by_hand(trees):
    a = nn.Dense(6).apply(trees[0], BATCH["inputs"])
    pair = count(a)
    b = Add().apply(trees[3], Join().apply(trees[2], *pair), a)
    dense = trees[4]["params"]["dense"]
    x = (b @ dense["kernel"] + dense["bias"]) * pair[0] + pair[1] * BATCH["mask"][:, None]
    return jnp.mean((trees[5] * x - b)[:, :3] * BATCH["targets"])


@pytest.mark.parametrize("case", CUTS[:4], ids=str)
def test_all_sorts_of_connections(case):
    with jax.numpy_dtype_promotion("standard"):
        check(cut(all_sorts(), lambda y, batch: jnp.mean(y[:, :3] * batch["targets"]), case), all_sorts_by_hand)


def test_alike_layers_with_skips_of_their_own_are_one_group():
    """Compiled once, although every block has another name for its skip and another lambda for its mask."""

    def block(i):
        return [
            jpipe.stash(nn.Dense(5), f"skip {i}"),
            jpipe.reads(Masked(), lambda batch: batch["mask"]),
            jpipe.pop(Add(), f"skip {i}"),
        ]

    shapes = jax.eval_shape(lambda: BATCH)
    layers = as_layers([nn.Dense(5), *[layer for i in range(4) for layer in block(i)], nn.relu])
    model = trace_model(layers, lambda batch: batch["inputs"], shapes)
    assert [group.layer.name for group in model.groups[1:-1]] == ["Dense", "Masked", "Add"]  # between the model's ends


def temporaries(last_use, m):
    """Bytes on a device of a model whose first stage has a wide layer; `last_use` pops what it stashes."""
    wide = jpipe.Layer(lambda key, x: jnp.ones((5, 1000), jnp.float32), lambda w, x: x @ w)
    layers = [nn.Dense(5), wide, *(nn.Dense(5) for _ in range(10))]
    if last_use:
        layers[1] = jpipe.stash(wide, "wide")
        layers[last_use] = jpipe.pop(Narrow(), "wide")
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=4, num_microbatches=m, balance=[6, 2, 2, 2])
    batch = {"inputs": jax.ShapeDtypeStruct((100 * m, 5), jnp.float32)}
    variables = jax.eval_shape(pipe.init, jax.random.key(0), batch)
    return jax.jit(pipe.value_and_grad).lower(variables, batch).compile().memory_analysis().temp_size_in_bytes


class Narrow(nn.Module):
    @nn.compact
    def __call__(self, x, kept):
        return nn.Dense(5)(x) + kept.sum(-1, keepdims=True)


def test_skips_are_freed():
    """Within a stage one takes memory for itself and its cotangent; across stages, a row a micro-batch in flight.

    What crosses does so while the next slot runs, and takes another row meanwhile.
    """
    size = 100 * 1000 * 4
    none, within, across = temporaries(None, 8), temporaries(4, 8), temporaries(11, 8)
    assert within - none < 3.5 * size
    assert across - none < 7 * size
    assert temporaries(11, 16) < across + 0.1 * size


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([jpipe.stash(nn.Dense(4), "a"), nn.Dense(4)], r"layer 0 \(Dense\) stashes 'a', which no later layer pops"),
        ([nn.Dense(4), jpipe.pop(Add(), "a")], r"layer 1 \(Add\) pops 'a', which no earlier layer stashes"),
        ([jpipe.pop(Add(), "a"), jpipe.stash(nn.Dense(4), "a")], r"layer 0 \(Add\) pops 'a', which no earlier"),
        (
            [jpipe.stash(nn.Dense(4), "a"), jpipe.stash(nn.Dense(4), "a"), jpipe.pop(Add(), "a")],
            r"layer 1 \(Dense\) stashes 'a', as layer 0 does",
        ),
        (
            [jpipe.stash(nn.Dense(4), "a"), jpipe.pop(Add(), "a"), jpipe.pop(Add(), "a")],
            r"layer 2 \(Add\) pops 'a', as layer 1 does; pop a second skip",
        ),
    ],
)
def test_pairs_that_do_not_match(layers, message):
    with pytest.raises(ValueError, match=message):
        jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=1, num_microbatches=1)


def test_side_inputs_that_are_not_there():
    sizes = {"num_stages": 1, "num_microbatches": 1, "balance": "even"}
    layers = [nn.Dense(4), jpipe.reads(Masked(), lambda batch: batch["mask"])]
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), **sizes)
    message = r"layer 1 \(Masked\) can't read a side input from {.*}: KeyError\('mask'\); pass the whole batch"
    with pytest.raises(ValueError, match=message):
        pipe.init(jax.random.key(0), {"inputs": BATCH["inputs"]})
    variables = pipe.init(jax.random.key(0), BATCH)
    with pytest.raises(ValueError, match=r"layer 1 \(Masked\) reads a side input; pass the whole batch"):
        pipe.apply(variables, BATCH["inputs"])


def test_layers_that_cannot_take_what_they_are_called_with():
    """What is shown is what the layer itself is called with."""
    sizes = {"num_stages": 1, "num_microbatches": 1, "balance": "even"}

    def init(*layers):
        return jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), **sizes).init(jax.random.key(0), BATCH)

    popped = r"layer 1 \(Dense\) raised .*\. It is called with \(x, kept\) = \(float32\[8,4\], float32\[8,4\]\)"
    with pytest.raises(ValueError, match=popped):
        init(jpipe.stash(nn.Dense(4), "a"), jpipe.pop(nn.Dense(4), "a"))
    side = (
        r"layer 0 \(Add\) raised TypeError at test_connections.py:.* \(x, side\) = \(float32\[8,5\], float32\[8,3\]\)"
    )
    with pytest.raises(ValueError, match=side):
        init(jpipe.reads(Add(), lambda batch: batch["targets"]))
    with pytest.raises(ValueError, match=r"layer 0 \(Add\) reads 'mask' from the batch; its function has to return"):
        init(jpipe.reads(Add(), lambda batch: "mask"))


def test_wrong_arguments():
    with pytest.raises(TypeError, match="name has to be a non-empty string"):
        jpipe.stash(nn.Dense(4), 3)
    with pytest.raises(TypeError, match="pass a function of the batch"):
        jpipe.reads(nn.Dense(4), "mask")
    with pytest.raises(ValueError, match="applied twice to the layer Dense"):
        jpipe.stash(jpipe.stash(nn.Dense(4), "a"), "b")


# --- the first layer reads its inputs from the micro-batch ------------------------------------------------------------

PAIR = {"a": np.ones((2, 3), np.float32), "b": np.full((2, 3), 2, np.float32)}


def test_the_first_layer_takes_no_activation(key):
    """What is read as a tuple is passed as several arguments."""
    first, second = with_inputs(as_layers([lambda a, b: a + b, nn.Dense(3)]), lambda batch: (batch["a"], batch["b"]))
    assert (first.reads_batch, second.reads_batch) == (True, False)
    assert first.init(key, (), PAIR) == {}
    outputs, _ = first.apply({}, (), Context(None, False, PAIR))
    assert_close(outputs, np.full((2, 3), 3, np.float32))


def test_its_variables_are_the_layers_own(key):
    (layer,) = as_layers([nn.Dense(4)])
    (reading,) = with_inputs([layer], lambda batch: batch["a"])
    variables = reading.init(key, (), PAIR)
    assert jax.tree.map(np.shape, variables) == {"params": {"kernel": (3, 4), "bias": (4,)}}
    outputs, _ = reading.apply(variables, (), Context(None, False, PAIR))
    assert_close(outputs, reading.bind(reading.to_item(variables))(PAIR["a"]))


def test_only_those_that_read_alike_are_the_same():
    read = lambda batch: batch["a"]
    one, same, other = (with_inputs(as_layers([nn.Dense(4)]), r)[0] for r in (read, read, lambda batch: batch["a"]))
    assert is_same(one, same)
    assert not is_same(one, other)
    assert not is_same(one, as_layers([nn.Dense(4)])[0])
