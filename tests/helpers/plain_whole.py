"""What a whole model computes without a pipeline: its loss and gradients over micro-batches, in plain JAX and Flax."""

from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jpipe.layers.calls import signature_of
from jpipe.memory.batches import default_inputs


@contextmanager
def in_float64() -> Iterator[None]:
    """Has modules that fix float32 in their code make and compute with float64 instead.

    JAX's own attention takes its softmax in float32. `jnp.clip` takes the names of older versions, too, for FlaxT5.
    """
    param, variable, single, clip = nn.Module.param, nn.Module.variable, jnp.float32, jnp.clip
    double = lambda tree: jax.tree.map(lambda a: a.astype(jnp.float64) if a.dtype == single else a, tree)

    def after(make):
        return make and (lambda *arguments, **options: double(make(*arguments, **options)))

    def double_param(self, name, make, *arguments, **options):
        return param(self, name, after(make), *arguments, **options)

    def double_variable(self, collection, name, make=None, *arguments, **options):
        return variable(self, collection, name, after(make), *arguments, **options)

    def old_clip(x, a_min=None, a_max=None, **options):
        return clip(x, **{"min": a_min, "max": a_max} | options)

    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        mock.patch.object(nn.Module, "param", double_param),
        mock.patch.object(nn.Module, "variable", double_variable),
        mock.patch.object(jnp, "float32", jnp.float64),
        mock.patch.object(jax.nn, "dot_product_attention", _attention),
        mock.patch.object(jnp, "clip", old_clip),
    ):
        yield


def _attention(query, key, value, *, is_causal):
    """`jax.nn.dot_product_attention` of `[b, T, heads, width]`."""
    mask = nn.make_causal_mask(query[..., 0, 0]) if is_causal else None
    return nn.dot_product_attention(query, key, value, mask=mask)


def arguments(case, batch):
    """What the model is called with, as positional arguments."""
    inputs = (case.inputs or default_inputs)(jax.tree.map(jnp.asarray, batch))
    return inputs if isinstance(inputs, tuple) else (inputs,)


def called(case, variables, batch, key=None):
    """(outputs, new state) of the model in plain Flax; in training if there is a key."""
    names = signature_of(type(case.model).__call__)
    mode = {"train": key is not None} if "train" in names else {}
    mode |= {"deterministic": key is None} if "deterministic" in names else {}
    if key is None:
        return jax.jit(lambda *given: case.model.apply(*given, **mode))(variables, *arguments(case, batch)), {}
    mutable = [name for name in variables if name != "params"]
    return case.model.apply(variables, *arguments(case, batch), rngs={"dropout": key}, mutable=mutable, **mode)


def made(case):
    """New variables in plain Flax."""
    inputs = arguments(case, jax.tree.map(lambda a: a[:2], case.batch))
    return dict(jax.jit(case.model.init)(jax.random.key(0), *inputs))


def plain(case, variables, num_microbatches, key):
    """(loss, new states of the micro-batches, gradients) in plain JAX: a loop over micro-batches."""

    def loss(params, part, key):
        outputs, state = called(case, variables | {"params": params}, part, key)
        return case.loss(outputs, part), state

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    cut = jax.tree.map(lambda a: a.reshape(num_microbatches, -1, *a.shape[1:]), case.batch)
    steps = [
        step(variables["params"], jax.tree.map(itemgetter(m), cut), jax.random.fold_in(key, m))
        for m in range(num_microbatches)
    ]
    mean = lambda *leaves: sum(leaves) / num_microbatches
    losses, states = zip(*(pair for pair, _ in steps), strict=True)
    return mean(*losses), states, jax.tree.map(mean, *(gradients for _, gradients in steps))


def difference(found, expected) -> float:
    """The largest difference of any element of any leaf, beside the largest element of all."""
    found, expected = nn.unbox(found), nn.unbox(expected)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs) / scale
