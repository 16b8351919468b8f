"""Documents packed into rows, with segment ids and positions as side inputs, train as each document by itself does."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from cases import assert_close, names

VOCABULARY, WIDTH, LENGTH, K, M = 11, 8, 9, 2, 3
LENGTHS = (5, 9, 2, 4, 3, 7, 6, 2, 3, 8)  # of documents; 49 tokens, where rows of their own would have 90 places

dense = functools.partial(nn.Dense, param_dtype=jnp.float64)
embed = functools.partial(nn.Embed, features=WIDTH, param_dtype=jnp.float64, dtype=jnp.float64)


class Enter(nn.Module):
    """Tokens, each at a place of its document."""

    @nn.compact
    def __call__(self, tokens, positions):
        return embed(VOCABULARY)(tokens) + embed(LENGTH)(positions)


class Attend(nn.Module):
    """A block whose tokens look at earlier ones of their own document."""

    @nn.compact
    def __call__(self, x, segments):
        mask = nn.combine_masks(nn.make_causal_mask(segments), nn.make_attention_mask(segments, segments, jnp.equal))
        norm = nn.LayerNorm(param_dtype=jnp.float64, force_float32_reductions=False)
        return x + dense(WIDTH)(nn.MultiHeadDotProductAttention(2, param_dtype=jnp.float64)(norm(x), mask=mask))


BLOCKS = 2
MODULES = [Enter(), *[Attend()] * BLOCKS, dense(VOCABULARY)]
SIDES = ["positions", *["segments"] * BLOCKS, None]


def read(name):
    return lambda batch: batch[name]


def layers():
    return [jpipe.reads(m, read(side)) if side else m for m, side in zip(MODULES, SIDES, strict=True)]


def loss_fn(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])


def rows_of(documents):
    """A batch of rows: of each the documents that lie in it, one after the other; 0 in what is left."""
    batch = {
        name: np.zeros((len(documents), LENGTH), np.int32) for name in ("inputs", "targets", "positions", "segments")
    }
    batch["weights"] = np.zeros((len(documents), LENGTH))
    for row, own in enumerate(documents):
        start = 0
        for number, tokens in enumerate(own, 1):
            at = (row, slice(start, start := start + len(tokens)))
            batch["inputs"][at], batch["positions"][at], batch["segments"][at] = tokens, np.arange(len(tokens)), number
            batch["targets"][at], batch["weights"][at] = np.roll(tokens, -1), [1.0] * (len(tokens) - 1) + [0.0]
    return batch


def packed(documents, count):
    """The documents in rows, each in the first that has room."""
    rows = [[] for _ in range(count)]
    for tokens in documents:
        next(row for row in rows if sum(map(len, row)) + len(tokens) <= LENGTH).append(tokens)
    return rows


@functools.cache
def truth():
    """(layers' variables, the packed batch, the loss, its gradients): of documents in rows of their own, plain Flax."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, VOCABULARY, length) for length in LENGTHS]
    alone, batch, trees = rows_of([[tokens] for tokens in documents]), rows_of(packed(documents, 9)), []
    sides = {
        "positions": np.tile(np.arange(LENGTH), (len(documents), 1)),
        "segments": np.ones((len(documents), LENGTH)),
    }
    given = [(sides[side],) if side else () for side in SIDES]  # nothing says where a row's document ends
    x = jax.ShapeDtypeStruct(alone["inputs"].shape, jnp.int32)
    for module, side in zip(MODULES, given, strict=True):
        x, shapes = jax.eval_shape(lambda x, m=module, s=side: m.init_with_output(jax.random.key(0), x, *s), x)
        trees.append(jax.tree.map(lambda a: rng.normal(size=a.shape) * 0.5, shapes))

    def loss_of(trees):
        x = alone["inputs"]
        for module, tree, side in zip(MODULES, trees, given, strict=True):
            x = module.apply(tree, x, *side)
        total, weight = loss_fn(x, alone)
        return total / weight

    return trees, batch, *jax.jit(jax.value_and_grad(loss_of))(trees)


NAMES = names(train=True, split=None)
FAST = ("1f1b",)


@pytest.mark.parametrize("schedule", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in NAMES])
def test_packed_documents_train_as_each_by_itself(schedule):
    with jax.enable_x64(True):
        trees, batch, loss, grads = truth()
        weights = np.split(batch["weights"], M)
        assert len({part.sum() for part in weights}) == M, "micro-batches have different numbers of tokens"
        chunks = 2 if schedule in names(chunks=2, split=None) else 1
        sizes = {"num_stages": K, "num_microbatches": M, "num_chunks": chunks}
        pipe = jpipe.Pipeline(layers(), loss_fn, **sizes, schedule=schedule, balance="even")
        variables = pipe.from_layer_variables(trees, batch)
        (found, _), gradients = pipe.value_and_grad(variables, batch)
        assert_close(found, loss, "loss")
        assert_close(pipe.layer_variables({"params": gradients}), grads, "gradients")
