"""A straight list has the equations of all blocks, and says what each value follows from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jpipe
from jpipe.cutting.straight import Follows, Part, rows_of, straighten
from jpipe.jax.flat_jaxpr import flatten
from jpipe.jax.tracing import equations_in, trace

W, STACK, X = jnp.ones((3, 3)), jnp.ones((4, 3, 3)), jnp.ones((2, 3))


def straight(function, variables, batch):
    closed = jax.make_jaxpr(function)(variables, batch)
    return straighten(closed, len(jax.tree.leaves(variables)), len(closed.out_avals), ())


def products(found):
    equations = found.flat.equations
    return [equations[i] for i in found.main if equations[i].equation.primitive.name == "dot_general"]


def test_values_follow_from_variables_the_batch_or_both():
    found = straight(lambda w, x: jnp.tanh(x + 1) @ (2 * w), W, X)
    (product,) = products(found)
    assert [found.sources[n] for n in product.reads] == [Follows.BATCH, Follows.VARIABLES]
    assert found.sources[product.makes[0]] is Follows.BOTH
    equations, parts = found.support(product.reads)
    assert [found.flat.equations[i].equation.primitive.name for i in equations] == ["add", "tanh", "mul"]
    assert list(parts) == [Part(0)]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_over_blocks_is_its_trips(reverse):
    scanned = lambda stack, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack, reverse=reverse)[0]
    found = straight(scanned, STACK, X)
    parts = [next(iter(found.support(product.reads)[1])) for product in products(found)]
    order = [3, 2, 1, 0] if reverse else [0, 1, 2, 3]
    assert parts == [Part(0, (i,)) for i in order]
    assert found.depths_read == {0: 1}


# --- rows of stacked arrays -------------------------------------------------------------------------------------------


KEY = jax.random.key(0)
INITIALISERS = {
    "lecun_normal": nnx.initializers.lecun_normal(),
    "zeros": nnx.initializers.zeros_init(),
    "flat": lambda key, shape, dtype: jax.random.normal(key, (shape[0] * shape[1],), dtype).reshape(shape).T.T,
    "orthogonal": nnx.initializers.orthogonal(),  # its decomposition isn't taken apart: it makes all, and slices
}


@pytest.mark.parametrize("name", INITIALISERS)
def test_a_row_is_made_without_the_others(name):
    make = jax.vmap(lambda key: INITIALISERS[name](key, (4, 4), jnp.float32))
    stacked = lambda key: make(jax.random.split(key, 7))
    flat = flatten(trace(stacked, KEY)[0])
    run = rows_of(flat, [(flat.results[0], (i,)) for i in (0, 5)])
    for row, i in zip(run(KEY), (0, 5), strict=True):
        np.testing.assert_allclose(row, stacked(KEY)[i], rtol=1e-6)
    shapes = {v.aval.shape for e in equations_in(trace(run, KEY)[0].jaxpr.eqns) for v in e.outvars}
    assert ((7, 4, 4) in shapes) is (name == "orthogonal")


class Block(nnx.Module):
    """A block, made for all by `nnx.vmap`."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return x + nnx.gelu(self.dense(x))


class Stack(nnx.Module):
    """Six blocks that one call makes, in a scan."""

    def __init__(self, rngs):
        make = nnx.split_rngs(splits=6)(nnx.vmap(lambda rngs: Block(rngs), in_axes=(0,), out_axes=0))
        self.blocks, self.head = make(rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        run = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.head(run(self.blocks, x))


def test_blocks_that_one_call_makes():
    batch = np.ones((8, 8), np.float32)
    pipe = jpipe.Pipeline(lambda rngs: Stack(rngs), lambda y, _: (y**2).mean(), num_stages=3, num_microbatches=2)
    found = pipe.model_variables(pipe.init(KEY, batch))
    expected = nnx.to_pure_dict(nnx.state(Stack(nnx.Rngs(KEY)), nnx.Param))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found["params"], expected)
    assert (1, 2, 3, 4, 5) in [group.indices for group in pipe.plan.model.groups]
    shapes = {v.aval.shape for init in pipe.planner.cut.inits for e in init.closed.jaxpr.eqns for v in e.outvars}
    assert (6, 8, 8) not in shapes
