"""Two values are the same only if code can't tell them apart; and where there is any doubt they aren't."""

import functools
from types import SimpleNamespace
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


def closure(c):
    return lambda x: x * jnp.copysign(1.0, c)


PAIRS = [
    (0.0, -0.0, False),
    ((1,), (True,), False),
    ([{"a": (0.0,)}], [{"a": (-0.0,)}], False),
    (np.float32(1), np.float64(1), False),
    (frozenset([1]), frozenset([True]), False),
    (float("nan"), float("nan"), True),
    ((1, {"a": [0.5, None, "b"]}), (1, {"a": [0.5, None, "b"]}), True),
    (functools.partial(max, 0.0), functools.partial(max, -0.0), False),
    (functools.partial(max, 1, key=None), functools.partial(max, 1, key=None), True),
    (nn.Dense(2), nn.Dense(2), True),
    (nn.Dense(2, kernel_init=nn.initializers.normal(0.5)), nn.Dense(2, kernel_init=nn.initializers.normal(0.5)), True),
    (nn.Dense(2, kernel_init=nn.initializers.normal(0.5)), nn.Dense(2, kernel_init=nn.initializers.normal(1.0)), False),
]


@pytest.mark.parametrize("make", [Constant, closure])
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


@pytest.mark.parametrize(("a", "b", "same"), [(0.0, -0.0, False), (1, True, False), (2.0, 2.0, True)])
def test_nnx_modules_of_other_bits_are_other_layers(a, b, same):
    """A regression, as of other layers."""
    assert is_same(*as_layers([NnxHolds(a), NnxHolds(b)])) is same


LOOSE = {
    "a Linen field": Holds,
    "an nnx module": NnxHolds,
    "an nnx factory": lambda held: lambda rngs: NnxHolds(held),
    "a closure": lambda held: lambda x: held(x),
    "a dict in a field": lambda held: Holds(functools.partial(lambda x, table: table["held"](x), table={"held": held})),
}


@pytest.mark.parametrize("name", LOOSE)
def test_a_loose_equality_makes_no_layers_one(name):
    """A regression: layers whose fields said that they are equal were compiled as one, and computed the same."""
    layers = [LOOSE[name](Loose(power)) for power in (2, 3, 2)]
    first, second, third = as_layers(layers)
    assert is_same(first, third)
    assert not is_same(first, second)


class Slotted:
    """Says that it equals all others; what it holds has no dict."""

    __slots__ = ("power",)

    def __init__(self, power):
        self.power = power

    def __eq__(self, other):
        return True

    __hash__ = object.__hash__


class Cached:
    """Equal to others of its size, whether or not it has computed its square."""

    def __init__(self, size):
        self.size = size

    def __eq__(self, other):
        return self.size == other.size

    __hash__ = None

    @functools.cached_property
    def square(self):
        return self.size**2


ARRAY, SQUARED = np.ones(2), Cached(3)
assert SQUARED.square == 9


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ([ARRAY], [ARRAY], True),
        ([ARRAY], [np.ones(2)], False),  # arrays may differ, or change
        ({"a": SimpleNamespace(b=1)}, {"a": SimpleNamespace(b=1)}, True),  # their class says so
        (SimpleNamespace(b=1), SimpleNamespace(b=True), False),  # 1 == True, but they hold something else
        (object(), object(), False),
        (max, max, True),
        (Slotted(2), Slotted(2), True),
        (Slotted(2), Slotted(3), False),
        (SQUARED, Cached(3), True),  # what an object has computed is no part of it
    ],
)
def test_objects(a, b, same):
    assert same_value(a, b) is same
