"""Two values are the same only if code can't tell them apart; and where there is any doubt they aren't."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpipe.layers.adapt import as_layers
from jpipe.layers.base import is_same
from jpipe.layers.same_value import same_value


class Constant(nn.Module):
    c: Any

    @nn.compact
    def __call__(self, x):
        return x * jnp.copysign(1.0, jnp.asarray(jax.tree.leaves(self.c)[0], jnp.float32))


@dataclasses.dataclass(frozen=True)
class CallableConstant:
    c: Any

    def __call__(self, x):
        return x * jnp.copysign(1.0, self.c)


def closure(c):
    return lambda x: x * jnp.copysign(1.0, c)


def default(c):
    def apply(x, *, c=c):
        return x * jnp.copysign(1.0, c)

    return apply


PAIRS = [
    (0.0, -0.0, False),
    (1, True, False),
    ((1,), (True,), False),
    ([{"a": (0.0,)}], [{"a": (-0.0,)}], False),
    ((np.float32(0.0),), (np.float32(-0.0),), False),
    (np.float32(1), np.float64(1), False),
    (complex(0.0, 0.0), complex(0.0, -0.0), False),
    (frozenset([1]), frozenset([True]), False),
    (float("nan"), float("nan"), True),
    ((1, {"a": [0.5, None, "b"]}), (1, {"a": [0.5, None, "b"]}), True),
    (frozenset([1, 2]), frozenset([2, 1]), True),
    (functools.partial(max, 0.0), functools.partial(max, -0.0), False),
    (functools.partial(max, 1, key=None), functools.partial(max, 1, key=None), True),
    (nn.Dense(2), nn.Dense(2), True),
    (nn.Dense(2, kernel_init=nn.initializers.normal(0.5)), nn.Dense(2, kernel_init=nn.initializers.normal(0.5)), True),
    (nn.Dense(2, kernel_init=nn.initializers.normal(0.5)), nn.Dense(2, kernel_init=nn.initializers.normal(1.0)), False),
]


@pytest.mark.parametrize("make", [Constant, CallableConstant, closure, default])
@pytest.mark.parametrize(("a", "b", "same"), PAIRS)
def test_values_of_other_types_or_bits_make_other_layers(make, a, b, same):
    """A regression: 0.0 == -0.0 and (1,) == (True,), so that unlike layers were taken for alike."""
    first, second = as_layers([make(a), make(b)])
    assert is_same(first, second) is same


def test_functions_that_hold_themselves():
    def make(c):
        def count(x):
            return count if x is None else x * c

        return count

    first, second, third = as_layers([make(1.0), make(1.0), make(2.0)])
    assert is_same(first, second)
    assert not is_same(first, third)


class Loose:
    """An activation function that says it equals all others, as if its number didn't matter."""

    def __init__(self, power):
        self.power = power

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0

    def __call__(self, x):
        return x**self.power


class Holds(nn.Module):
    activation: Any

    def __call__(self, x):
        return self.activation(x)


class NnxHolds(nnx.Module):
    def __init__(self, activation):
        self.activation = activation

    def __call__(self, x):
        return self.activation(x)


LOOSE = {
    "a function": lambda held: held,
    "a Linen field": Holds,
    "an nnx module": NnxHolds,
    "an nnx factory": lambda held: lambda rngs: NnxHolds(held),
    "a closure": lambda held: lambda x: held(x),
    "a dict in a field": lambda held: Holds(functools.partial(lambda x, table: table["held"](x), table={"held": held})),
    "a set in a closure": lambda held: lambda x, many=frozenset([held]): next(iter(many))(x),
}


@pytest.mark.parametrize("name", LOOSE)
def test_a_loose_equality_makes_no_layers_one(name):
    """A regression: layers whose fields said that they are equal were compiled as one, and computed the same."""
    assert not is_same(*as_layers([LOOSE[name](Loose(power)) for power in (2, 3)]))


def test_a_function_before_its_variable_is_set():
    functions = [lambda: late for _ in range(2)]
    assert same_value(functions[0], functions[0])
    assert not same_value(*functions)
    late = 1
    assert same_value(*functions)
    assert functions[0]() == late


ARRAY = np.ones(2)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ([ARRAY], [ARRAY], True),
        ([ARRAY], [np.ones(2)], False),  # arrays may differ, or change
        (Loose(2), Loose(2), False),  # a user's class says so, which may leave out what matters
        (np.dtype("float32"), np.dtype("float32"), True),
        (object(), object(), False),
        (max, max, True),
    ],
)
def test_objects(a, b, same):
    assert same_value(a, b) is same
