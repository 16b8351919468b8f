"""Parameters split over data axes: gathered once a step or at each use, reduced once, their state split too."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from cases import VOCABULARY, WIDTH, assert_close, check_step, make_model, pipeline, tokens, weighted_cross_entropy
from collectives import axes_of, in_loop, read

HIDDEN = 128  # a kernel of 8 x 128 has 1024 elements, so that it is split by `shard_over`


class Block(nn.Module):
    """A residual block; its kernels are split over `fsdp` along the dimension that metadata says, if it does."""

    up: tuple | None = None
    down: tuple | None = None
    dtype: object = jnp.float64

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        split = lambda names: init if names is None else nn.with_partitioning(init, names)
        h = nn.Dense(HIDDEN, param_dtype=self.dtype, kernel_init=split(self.up))(x)
        return x + nn.Dense(WIDTH, param_dtype=self.dtype, kernel_init=split(self.down))(nn.tanh(h))


def model_of(*splits):
    """An embedding, blocks and a head."""
    with jax.enable_x64(True):
        embed = nn.Embed(VOCABULARY, WIDTH, param_dtype=jnp.float64, dtype=jnp.float64)
        layers = [embed, *[Block(*split) for split in splits], nn.Dense(VOCABULARY, param_dtype=jnp.float64)]
        return make_model(layers, weighted_cross_entropy, tokens())


@pytest.fixture(scope="module")
def split_model():
    both = ("fsdp", "tp"), ("tp", "fsdp")
    jointly = ((None, ("tp", "fsdp")), (("fsdp", "tp"), None))
    return model_of(both, both, jointly, jointly)


@pytest.fixture(scope="module")
def plain_model():
    return model_of((), (), (), ())


def spread(tree):
    """For each leaf, the share of it that one device has."""
    return [leaf.addressable_shards[0].data.size / leaf.size for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    ("axes", "gather", "explicit"),
    [
        (("fsdp", "tp"), "use", False),
        (("fsdp", "tp"), "step", True),
        pytest.param(("data", "fsdp"), "use", False, marks=pytest.mark.slow),
        pytest.param(("data", "fsdp"), "step", False, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_split_parameters(make_mesh, split_model, axes, gather, explicit):
    """Over `fsdp`; `data` is an axis of examples alone."""
    with jax.enable_x64(True):
        mesh = make_mesh((2, 2, 2), ("stage", *axes), explicit=explicit)
        pipe = pipeline(split_model, "1f1b", 2, 3, mesh=mesh, balance="even", gather=gather)
        variables, grads = check_step(pipe, split_model)
        kernels = [name for name in variables["params"] if "fsdp" in name]
        assert len(kernels) == 4
        for tree in (variables["params"], grads):
            assert spread({name: tree[name] for name in kernels}) == [1 / (8 if "tp" in axes else 4)] * 4


@pytest.mark.parametrize(("gather", "remat"), [("step", "layer"), pytest.param("use", "none", marks=pytest.mark.slow)])
def test_shard_over_a_data_axis(make_mesh, plain_model, gather, remat):
    """ZeRO-1: after two steps of adamw everything is as without it, and parameters and moments are split."""
    results = []
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for options in ({}, {"shard_over": ("data",), "gather": gather}):
            mesh = make_mesh((2, 2), ("stage", "data"))
            pipe = pipeline(plain_model, "1f1b", 2, 3, mesh=mesh, balance="even", remat=remat, **options)
            variables = pipe.from_layer_variables(plain_model.trees, plain_model.batch)
            # With adam's own eps elements whose gradients are nearly zero would be moved as rounding decides.
            tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-4))
            state = pipe.create_state(jax.random.key(0), plain_model.batch, tx, variables)
            for _ in range(2):
                state, metrics = pipe.train_step(state, plain_model.batch)
            results.append(jax.device_get((metrics, pipe.layer_variables(state.variables))))
            large = {name: leaf for name, leaf in state.variables["params"].items() if leaf[0, 0].size >= 1024}
            moments = {name: state.opt_state[1][0].mu[name] for name in large}
            assert len(large) == 2
            assert spread(large) == spread(moments) == [1 / (4 if options else 2)] * 2
    assert_close(results[1], results[0], "after two steps")


@pytest.mark.parametrize(
    ("gather", "gathered_in_loops"), [("step", False), ("use", True)], ids=["once a step", "at each use"]
)
def test_what_is_sent_for_split_parameters(make_mesh, split_model, gather, gathered_in_loops):
    """Parameters are gathered where it was asked for, and there their gradients are scattered; others once, at last."""
    with jax.enable_x64(True):
        mesh = make_mesh((2, 2, 2), ("stage", "fsdp", "tp"))
        pipe = pipeline(split_model, "1f1b", 2, 3, mesh=mesh, balance="even", gather=gather)
        shapes = jax.eval_shape(pipe.init, jax.random.key(0), split_model.batch)
        text = jax.jit(pipe.value_and_grad).lower(shapes, split_model.batch).compile().as_text()
    over_fsdp = [c for c in read(text) if axes_of(c, mesh) == ("fsdp",)]
    gathers = {in_loop(c) for c in over_fsdp if c.kind == "all-gather"}
    reductions = [c for c in over_fsdp if c.kind in ("reduce-scatter", "all-reduce")]
    assert gathers == {gathered_in_loops}
    assert {in_loop(c) for c in reductions if c.kind == "reduce-scatter"} == {gathered_in_loops}
    assert any(c.kind == "all-reduce" and not in_loop(c) for c in reductions), "of biases, which nothing splits"


def test_state_of_parameters_of_one_shape_and_different_splits(make_mesh):
    """A regression: `per_layer` looked up how a moment is split by its shape, which two parameters may share."""

    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.initializers.lecun_normal()
            for names in ((None, "model"), ("model", None), (None, None)):
                x = nn.Dense(8, use_bias=False, kernel_init=nn.with_partitioning(init, names))(x)
            return x

    mesh = make_mesh((2, 2), ("stage", "model"))
    options = {"num_stages": 2, "num_microbatches": 2, "balance": "even"}
    pipe = jpipe.Pipeline([Two(), Two()], lambda y, _: jnp.mean(y), **options, mesh=mesh)
    x = np.ones((4, 8), np.float32)
    state = pipe.create_state(jax.random.key(0), x, jpipe.per_layer(optax.adam(1e-3)))
    splits = lambda tree: sorted(str(tuple(leaf.sharding.spec)[2:]) for leaf in tree.values() if leaf.ndim == 4)
    params = splits(state.variables["params"])
    assert len(set(params)) == 3
    assert splits(state.opt_state) == params
