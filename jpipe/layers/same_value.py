"""Compares Python values part by part, functions above all; `is_same` (`layers/base.py`) compares layers by it.

A function made twice from the same values is two objects that aren't equal, as are layers built of such functions. So
values are taken apart, down to parts that Python or a library compares. Both are compared as they are now; an object
that both hold isn't taken apart.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType

import jax
import numpy as np

LIBRARIES = ("jpipe", "optax", "jax", "jaxlib", "flax", "chex", "numpy", "builtins")
"""Packages with objects whose `==` compares all that matters."""


def same_value(a: object, b: object, pending: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Whether two Python values have the same types and bits all the way down, so that code can't tell them apart.

    Unlike `==`, which takes 0.0 for -0.0, 1 for True, and nan for another value than itself. Arrays are the same only
    if they are one object; dataclasses, if their fields are; other objects of libraries, if their class says so by
    `==`. A user's `==` may leave out what matters.

    >>> same_value((1, {"a": float("nan")}), (1, {"a": float("nan")})), same_value((0.0,), (-0.0,)), same_value(1, True)
    (True, False, False)

    Functions are the same if the same line of code made them from the same values.

    >>> same_value(*[lambda x: x + 1 for _ in range(2)])
    True

    Args:
      a: one value.
      b: the other.
      pending: the pairs, by identity, that are being compared, for functions and containers that hold themselves.
    """
    if a is b or (id(a), id(b)) in pending:
        return True
    if type(a) is not type(b):
        return False
    first, second = _parts(a), _parts(b)
    pending |= {(id(a), id(b))}
    if first is None or second is None:
        return _is_equal(a, b)
    return len(first) == len(second) and all(same_value(x, y, pending) for x, y in zip(first, second, strict=False))


def values_within(value: object, seen: set[int] | None = None) -> Iterator[object]:
    """Yields the value and all of its parts, as `same_value` compares them.

    Args:
      value: any Python value.
      seen: the ids of values whose parts were given already, for those that hold themselves.
    """
    seen = set() if seen is None else seen
    yield value
    if id(value) not in seen:
        seen.add(id(value))
        for part in _parts(value) or ():
            yield from values_within(part, seen)


def _parts(value: object) -> Sequence[object] | None:
    """Lists the parts of a value, to be compared one by one; None if it is compared as a whole."""
    match value:
        case float() | complex() | np.generic():
            return [str(np.asarray(value).dtype), np.asarray(value).tobytes()]
        case tuple() | list():
            return list(value)
        case Mapping():
            return [part for item in value.items() for part in item]
        case functools.partial():
            return [value.func, value.args, value.keywords]
        case set() | frozenset():
            return sorted(value, key=lambda item: f"{type(item)} {item!r}")
        case FunctionType():
            try:
                enclosed = [variable.cell_contents for variable in value.__closure__ or ()]
            except ValueError:  # a variable isn't set yet
                return None
            defaults = [value.__defaults__, value.__kwdefaults__]
            return [value.__code__, id(value.__globals__), *defaults, enclosed, value.__dict__]
    if dataclasses.is_dataclass(value) and type(value).__eq__ is not object.__eq__:
        # Linen modules are dataclasses; the module that one is a part of is no part of it.
        return [getattr(value, field.name, None) for field in dataclasses.fields(value) if field.name != "parent"]
    return None


def _is_equal(a: object, b: object) -> bool:
    """Whether two objects without parts are equal, as their class says. An array is equal to itself alone."""
    library, *_ = type(a).__module__.split(".")
    return library in LIBRARIES and not isinstance(a, jax.Array | np.ndarray) and (a == b) is True
