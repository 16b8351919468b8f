"""Parts of a trace that are the same but for scalars are one jaxpr, if they are differentiated alike, too."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.cutting.module import make_whole
from jpipe.cutting.whole import cut_model
from jpipe.jax.flat_jaxpr import flatten, without_calls
from jpipe.jax.primitives import PLAIN_CALLS
from jpipe.jax.tracing import trace
from jpipe.layers.adapt import as_whole
from jpipe.model import alike
from jpipe.model.groups import scalars_of
from jpipe.model.kinds import Kinds
from jpipe.model.trace import trace_model

X = jax.ShapeDtypeStruct((2, 3), jnp.float32)


def parts_of(*functions):
    """Each function as a part, all of one `Kinds`."""
    kinds, parts = Kinds(), []
    for function in functions:
        flat = flatten(jax.make_jaxpr(function)(X), calls=PLAIN_CALLS)
        parts.append(kinds.part(flat, flat.equations, flat.arguments, flat.results))
    return parts


def scaled(rule: float, rate: float):
    """`sin(x * rate)`, with a derivative of its own."""

    @jax.custom_vjp
    def call(x):
        return jnp.sin(x)

    call.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * rule,))
    return lambda x: call(x * jnp.float32(rate))


def turned(x, by: complex):
    return jax.lax.complex(x, x) * np.complex64(by)


def test_scalars_are_the_only_difference_within_a_kind():
    first, second, third = parts_of(lambda x: x * 2.0 + 3.0, lambda x: x * 4.0 + 5.0, lambda x: x * 2.0 - 3.0)
    assert first.kind == second.kind != third.kind
    assert [s.tolist() for s in second.scalars] == [4.0, 5.0]
    run = jax.extend.core.jaxpr_as_fun
    np.testing.assert_array_equal(run(second.closed)(np.ones((2, 3), np.float32))[0], np.full((2, 3), 9.0))


def test_scalars_are_those_of_a_trace():
    (part,) = parts_of(lambda x: jnp.where(x > 0, x * 2.0, 0.5 * x) + jax.nn.gelu(x) ** 3)
    call = jax.extend.core.jaxpr_as_fun(part.closed)
    traced = scalars_of(without_calls(trace(call, X)[0], PLAIN_CALLS))
    assert [s.tolist() for s in part.scalars] == [s.tolist() for s in traced] != []


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (jax.nn.relu, jax.nn.relu, True),
        (scaled(1.0, 2.0), scaled(1.0, 3.0), True),
        (scaled(1.0, 2.0), scaled(0.5, 2.0), False),
        (lambda x: x + np.eye(2, 3, dtype=np.float32), lambda x: x + np.ones((2, 3), np.float32), False),
        (lambda x: jnp.sum(x, 0), lambda x: jnp.sum(x, 1), False),
        (lambda x: x, lambda x: x * 1.0, False),
        (lambda x: turned(x, 2j), lambda x: turned(x, 3j), False),  # they were taken for one function
    ],
    ids=["relu", "rates", "rules", "arrays", "axes", "nothing", "complex"],
)
def test_what_is_one_kind(one, other, same):
    first, second = parts_of(one, other)
    assert (first.kind == second.kind) is same


class Deep(nn.Module):
    """Twenty blocks with a rate each."""

    scanned: bool

    @nn.compact
    def __call__(self, x):
        if self.scanned:
            return nn.Dense(3)(nn.scan(Step, {"params": 0}, split_rngs={"params": True}, length=20)()(x, None)[0])
        for i in range(20):
            x = x + 0.1 * i * nn.Dense(3)(nn.relu(nn.Dense(5)(x)))
        return nn.Dense(3)(x)


class Step(nn.Module):
    """A block of a scan."""

    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(3)(nn.relu(nn.Dense(5)(x))), None


@pytest.mark.parametrize("scanned", [False, True])
def test_one_block_of_many_is_traced(scanned, monkeypatch):
    traced, trace_modes = [], alike.trace_modes
    counted = lambda layer, *rest: traced.append(layer.name) or trace_modes(layer, *rest)
    monkeypatch.setattr(alike, "trace_modes", counted)
    layer, read = as_whole(Deep(scanned)), lambda x: x
    whole = make_whole(layer, read, X)
    whole, modes = whole.read_by(None, whole.trace(read, X), X)
    cut = cut_model(whole, modes, 4)
    groups = trace_model(cut.layers(modes), read, X).groups
    assert sorted(len(group.indices) for group in groups)[-1] >= 18
    assert len(traced) <= len(groups)
