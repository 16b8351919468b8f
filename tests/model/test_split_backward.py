"""A backward in two parts: together they give what the whole gives, and no product is computed twice."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import assert_close
from jpipe.jax.tracing import replay
from jpipe.model.remat import save_but_elementwise
from jpipe.model.split_backward import split_in_two

HEAVY = ("dot_general", "conv_general_dilated", "scan", "while", "custom_call")
SHAPES = {"w": (4, 6), "b": (6,), "v": (6, 4), "g": (4,)}


def mlp(params, x):
    return jax.nn.gelu((x * params["g"]) @ params["w"] + params["b"]) @ params["v"]


def scaled(params, x):
    """Both operands of a product are made again for W, of one shape. Once they were one variable, the product wrong."""
    y = jax.nn.gelu(jax.lax.stop_gradient(x)) @ (params["w"] @ params["v"])
    return x + y * params["g"] + params["b"].sum()


def recurrent(params, x):
    """Its weights are used in a loop, which gives the gradient of the input too."""
    turn = lambda h, _: (jnp.tanh(h * params["g"] @ params["w"] + params["b"]) @ params["v"], None)
    return jax.lax.scan(turn, x, None, length=3)[0]


def convolved(params, x):
    kernel = params["w"].reshape(2, 3, 4)[..., None]
    y = jax.lax.conv_general_dilated(x[:, None, :, None], kernel.reshape(4, 1, 2, 3), (1, 1), "SAME")
    return y.mean((1, 3)) @ jnp.ones((4, 4)) * params["g"] + params["b"].sum() + params["v"].sum()


def backward_of(function, policy=None):
    """(its jaxpr, arguments, the number of residuals and of parameters)."""
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.standard_normal(shape)) for name, shape in SHAPES.items()}
    x, dy = jnp.asarray(rng.standard_normal((3, 4))), jnp.asarray(rng.standard_normal((3, 4)))
    run = jax.checkpoint(function, policy=policy, prevent_cse=False) if policy else function
    _, vjp = jax.vjp(run, params, x)
    residuals, structure = jax.tree.flatten(vjp)
    closed = jax.make_jaxpr(lambda leaves, dy: jax.tree.leaves(jax.tree.unflatten(structure, leaves)(dy)))(
        residuals, dy
    )
    return closed, [*residuals, dy]


def in_two_parts(closed, arguments, urgent, residuals=None):
    """(the two parts, the results of both in the order of the whole)."""
    given = len(arguments) - 1
    parts = split_in_two(closed, urgent, range(given) if residuals is None else residuals, given)
    found = replay(parts.inputs, [0] * len(parts.inputs.out_avals))(arguments)
    early, w_inputs = found[: len(parts.early)], found[len(parts.early) :]
    late = replay(parts.weights, [0] * len(parts.late))([arguments[i] for i in parts.reads], w_inputs)
    results = dict(zip([*parts.early, *parts.late], [*early, *late], strict=True))
    return parts, [results[i] for i in range(len(results))]


def heavy_in(jaxpr):
    return Counter(e.primitive.name for e in jaxpr.jaxpr.eqns if e.primitive.name in HEAVY)


@pytest.mark.parametrize(
    "policy", [None, jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.nothing_saveable]
)
@pytest.mark.parametrize("function", [mlp, scaled, recurrent, convolved])
def test_both_parts_give_what_the_whole_gives_and_no_product_twice(function, policy):
    with jax.enable_x64(True):
        closed, arguments = backward_of(function, policy)
        whole, alone = in_two_parts(closed, arguments, ())
        parts, found = in_two_parts(closed, arguments, [len(SHAPES)])
        expected = jax.jit(lambda arguments: jax.tree.leaves(replay(closed, [0] * 5)(arguments)))(arguments)
        assert_close(found, expected)
        assert_close(alone, expected)
    assert (whole.late, whole.reads) == ((), ()), "nothing waits for a gradient, so nothing is put off"
    assert heavy_in(parts.inputs) + heavy_in(parts.weights) == heavy_in(whole.inputs)


def test_what_follows_from_residuals_is_made_again_and_not_stashed():
    """`dv = gelu(h).T @ dy` and `dw = (x * g).T @ dh` need x, g and h, which the forward kept, and of I dy and dh."""
    closed, arguments = backward_of(mlp, save_but_elementwise)
    residuals = [i for i, leaf in enumerate(arguments[:-1]) if leaf.shape not in SHAPES.values()]
    parts, _ = in_two_parts(closed, arguments, [4], residuals)
    w_inputs = [v.aval.shape for v in parts.inputs.jaxpr.outvars[len(parts.early) :]]
    assert sorted(w_inputs) == [(3, 4), (3, 6)]
    assert "tanh" in {e.primitive.name for e in parts.weights.jaxpr.eqns}


def test_an_effect_happens_once_in_the_first_part():
    def chatty(params, x):
        jax.debug.print("{}", x.sum())
        return mlp(params, x)

    closed, arguments = backward_of(chatty, jax.checkpoint_policies.nothing_saveable)
    parts, _ = in_two_parts(closed, arguments, [4])
    prints = lambda jaxpr: sum(bool(e.effects) for e in jaxpr.jaxpr.eqns)
    assert prints(parts.weights) == 0
    assert prints(parts.inputs) == prints(in_two_parts(closed, arguments, ())[0].inputs)
