"""What a whole model computes without a pipeline: its loss and gradients over micro-batches, in plain JAX and Flax."""

from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jpipe
from cases import assert_close
from jpipe.layers.calls import signature_of
from jpipe.memory.batches import default_inputs

SEED = 3
"""A key made on import would start JAX before a benchmark has chosen its devices."""


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


def _attention(query, key, value, bias=None, mask=None, *, scale=None, is_causal=False, **_):
    """`jax.nn.dot_product_attention` of `[b, T, heads, width]`."""
    if is_causal:
        mask = nn.make_causal_mask(query[..., 0, 0])
    if scale is not None:
        query = query * (scale * query.shape[-1] ** 0.5)
    return nn.dot_product_attention(query, key, value, bias, mask)


def arguments(case, batch):
    """What the model is called with, as positional arguments."""
    inputs = (case.inputs or default_inputs)(jax.tree.map(jnp.asarray, batch))
    return inputs if isinstance(inputs, tuple) else (inputs,)


def called(case, variables, batch, key=None):
    """(outputs, new state) of the model in plain Flax; in training if there is a key."""
    model = case.model
    if isinstance(model, jpipe.Layer):
        return model.apply(variables["params"], *arguments(case, batch)), {}
    is_linen = isinstance(model, nn.Module)
    names = signature_of(type(model).__call__ if is_linen else type(_nnx(model)).__call__)
    mode = {"train": key is not None} if "train" in names else {}
    mode |= {"deterministic": key is None} if "deterministic" in names else {}
    if not is_linen:
        graph, _, rest = nnx.split(_nnx(model), nnx.Param, ...)
        return nnx.merge(graph, nnx.State(variables["params"]), rest)(*arguments(case, batch), **mode), {}
    if key is None:
        return jax.jit(lambda *given: model.apply(*given, **mode))(variables, *arguments(case, batch)), {}
    mutable = [name for name in variables if name != "params"]
    return model.apply(variables, *arguments(case, batch), rngs={"dropout": key}, mutable=mutable, **mode)


def _nnx(model):
    """The module of a factory."""
    return model if isinstance(model, nnx.Module) else model(rngs=nnx.Rngs(0))


def made(case):
    """New variables in plain Flax, by collection."""
    inputs = arguments(case, jax.tree.map(lambda a: a[:2], case.batch))
    if isinstance(case.model, jpipe.Layer):
        return {"params": case.model.init(jax.random.key(0), *inputs)}
    if isinstance(case.model, nn.Module):
        return dict(jax.jit(case.model.init)(jax.random.key(0), *inputs))
    return {"params": nnx.to_pure_dict(nnx.state(_nnx(case.model), nnx.Param))}


def parts_of(batch, count):
    """A batch's micro-batches."""
    cut = jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[1:]), batch)
    return [jax.tree.map(itemgetter(m), cut) for m in range(count)]


def plain(case, variables, num_microbatches, key):
    """(loss, new states of the micro-batches, gradients) in plain JAX: a loop over micro-batches."""

    def loss(params, part, key):
        outputs, state = called(case, variables | {"params": params}, part, key)
        return case.loss(outputs, part), state

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    parts = enumerate(parts_of(case.batch, num_microbatches))
    steps = [step(variables["params"], part, jax.random.fold_in(key, m)) for m, part in parts]
    mean = lambda *leaves: sum(leaves) / num_microbatches
    losses, states = zip(*(pair for pair, _ in steps), strict=True)
    return mean(*losses), states, jax.tree.map(mean, *(gradients for _, gradients in steps))


def of_model(case, variables):
    """Variables by collection as the model's own `init` returns them: a function's are its parameters alone."""
    return variables["params"] if isinstance(case.model, jpipe.Layer) else variables


def check(case, *, variables=None, frozen=None, num_microbatches=4, key=None, outputs=True, **options):
    """Loss, gradients, running means and outputs of a pipeline are those of plain Flax; (pipeline, its variables).

    Args:
      case: the model and its batch. Other options are the pipeline's, which has two stages by default.
      variables: by collection, if not new ones.
      frozen: tells by their names which parameters at the top are frozen.
      num_microbatches, key: of the step.
      outputs: whether those of `apply` are compared too; a pipeline leaves out what its loss doesn't read.
    """
    model = jpipe.freeze(case.model, frozen) if frozen else case.model
    options = {"num_stages": 2, "num_microbatches": num_microbatches, "inputs": case.inputs} | options
    pipe, variables = jpipe.Pipeline(model, case.loss, **options), variables or made(case)
    key = jax.random.key(SEED) if key is None else key
    loss, states, expected = plain(case, variables, num_microbatches, key)
    placed = pipe.from_model_variables(of_model(case, variables), case.batch)
    (found, new), gradients = pipe.value_and_grad(placed, case.batch, key)
    assert_close(found, loss, "loss")
    trained = {name: tree for name, tree in expected.items() if not frozen(name)} if frozen else expected
    own = nn.unbox(pipe.model_variables({"params": gradients}))
    assert_close(own, of_model(case, {"params": nn.unbox(trained)}), "gradients")
    if new and not frozen:
        means = jax.tree.leaves(jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *states))
        for (path, leaf), mean in zip(jax.tree.leaves_with_path(pipe.model_variables(new)), means, strict=True):
            if path[-1].key == "mean":  # of which the whole batch's is the mean
                np.testing.assert_allclose(leaf, mean.astype(leaf.dtype), rtol=1e-6)
    if outputs:
        parts = [called(case, variables, part)[0] for part in parts_of(case.batch, num_microbatches)]
        assert_close(
            pipe.apply(placed, case.batch), jax.tree.map(lambda *each: np.concatenate(each), *parts), "outputs"
        )
    return pipe, placed


def difference(found, expected) -> float:
    """The largest difference of any element of any leaf, beside the largest element of all."""
    found, expected = nn.unbox(found), nn.unbox(expected)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs) / scale
