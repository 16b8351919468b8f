"""Compares Python values part by part, functions above all; `is_same` (`layers/base.py`) compares layers by it.

A function made twice from the same values is two objects that aren't equal, as are layers and optimisers built of such
functions. So values are taken apart, down to parts that Python or a library compares. `same_value` compares
two values as they are now, part by part; an object that both hold isn't taken apart. A `fingerprint` is kept, to be
compared with those of values made later: it also holds the global variables that a function names, and a part that may
have changed in the meantime counts as another.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType, NoneType

import jax
import numpy as np

LIBRARIES = ("jpipe", "optax", "jax", "flax", "chex", "numpy", "builtins")
"""Packages in which nothing changes while Python runs, so that their functions depend on their arguments alone."""


def same_value(a: object, b: object) -> bool:
    """Whether two Python values have the same types and bits all the way down, so that code can't tell them apart.

    Unlike `==`, which takes 0.0 for -0.0, 1 for True, and nan for another value than itself. Arrays are the same only
    if they are one object; dataclasses, if their fields are; other objects, if their class says so by `==` and the
    attributes that they hold are the same too, since a user's `==` may leave some of them out.

    >>> same_value((1, {"a": float("nan")}), (1, {"a": float("nan")})), same_value((0.0,), (-0.0,)), same_value(1, True)
    (True, False, False)

    Functions are the same if the same line of code made them from the same values.

    >>> same_value(*[lambda x: x + 1 for _ in range(2)])
    True
    """
    return _same(a, b)


def _same(a: object, b: object, pending: frozenset = frozenset()) -> bool:
    """Whether two values are the same, part by part.

    Args:
      a: one value.
      b: the other.
      pending: the pairs, by identity, that are being compared, for functions and containers that hold themselves.
    """
    if a is b or (id(a), id(b)) in pending:
        return True
    if type(a) is not type(b):
        return False
    first, second = _parts(a, False), _parts(b, False)
    pending |= {(id(a), id(b))}
    if first is None or second is None:
        return _Whole(a) == _Whole(b) and _same(_held(a), _held(b), pending)
    pairs = zip(first, second, strict=False)
    return len(first) == len(second) and all(_same(x, y, pending) for x, y in pairs)


@lru_cache(maxsize=32)
def fingerprint(value: object) -> Hashable:
    """Makes a hashable that is equal for two values only if they are sure to be the same, whenever they were made.

    Functions are the same if their code is, and their defaults, the variables that they enclose and the global ones
    that they name; numbers, if they are of one type and have the same bits; tuples, lists and dictionaries, if what is
    in them now is the same. What may have changed in the meantime (other objects, other modules) is equal to nothing.

    >>> def scale(by):
    ...     return lambda x: x * by
    >>> fingerprint(scale(2)) == fingerprint(scale(2)), fingerprint(scale(2)) == fingerprint(scale(2.0))
    (True, False)
    """
    return _fingerprint(value, ())


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
        for part in _parts(value, False) or ():
            yield from values_within(part, seen)


def _fingerprint(value: object, within: tuple[int, ...]) -> Hashable:
    """Returns a value's type and its parts' fingerprints, or the value itself where it has no parts.

    Args:
      value: any Python value.
      within: the ids of the values that this one is inside of, the outermost first.
    """
    if id(value) in within:  # a function or a container that holds itself
        return ("again", len(within) - within.index(id(value)))
    parts = _parts(value, True)
    if parts is None:
        return _Whole(value) if _never_changes(value) else object()
    within = (*within, id(value))
    return (type(value), *(_fingerprint(part, within) for part in parts))


def _parts(value: object, kept: bool) -> Sequence[object] | None:
    """Lists the parts of a value, to be compared one by one; None if it is compared as a whole.

    Args:
      value: any Python value.
      kept: whether it will be compared with values of later times.
    """
    match value:
        case float() | complex() | np.generic():
            return [str(np.asarray(value).dtype), np.asarray(value).tobytes()]
        case tuple() | list():
            return list(value)
        case Mapping() if type(value) is dict or not kept:
            return [part for item in value.items() for part in item]
        case functools.partial():
            return [value.func, value.args, value.keywords]
        case FunctionType():
            return _parts_of_function(value, kept)
    if kept:
        return None
    if isinstance(value, set | frozenset):
        return sorted(value, key=lambda item: f"{type(item)} {item!r}")
    if dataclasses.is_dataclass(value) and type(value).__eq__ is not object.__eq__:
        # Linen modules are dataclasses; the module that one is a part of is no part of it.
        return [getattr(value, field.name, None) for field in dataclasses.fields(value) if field.name != "parent"]
    return None


def _held(value: object) -> object:
    """Returns the attributes of an object; None for those of libraries, whose `==` compares all that matters."""
    state = None if _is_library(type(value).__module__) else object.__getstate__(value)
    if not isinstance(state, dict):
        return state
    is_cached = lambda name: isinstance(getattr(type(value), name, None), functools.cached_property)
    return {name: held for name, held in state.items() if not is_cached(name)}


def _parts_of_function(function: FunctionType, kept: bool) -> Sequence[object] | None:
    """Lists the code of a function, and all values that it finds outside of its arguments."""
    try:
        enclosed = [variable.cell_contents for variable in function.__closure__ or ()]
    except ValueError:  # a variable isn't set yet
        return None
    variables = function.__globals__
    named: list[object] = []
    if kept and not _is_library(function.__module__):
        named = [variables[name] for name in _names(function.__code__) if name in variables]
    defaults = [function.__defaults__, function.__kwdefaults__]
    return [function.__code__, _Whole(variables), *defaults, enclosed, function.__dict__, named]


def _names(code: CodeType) -> Iterator[str]:
    """Yields the global variables and attributes that code names, or code inside of it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _never_changes(value: object) -> bool:
    if isinstance(value, type | ModuleType):
        return _is_library(value.__name__ if isinstance(value, ModuleType) else value.__module__)
    plain = (NoneType, bool, int, str, bytes, CodeType, _Whole)
    return type(value) in plain or isinstance(value, jax.Array | np.dtype | np.ufunc)


def _is_library(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in LIBRARIES


class _Whole:
    """A value without parts. Arrays and the global variables of modules are equal to themselves alone."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Whole) or type(self.value) is not type(other.value):
            return False
        if self.value is other.value or isinstance(self.value, jax.Array | np.ndarray | dict):
            return self.value is other.value
        try:
            return (self.value == other.value) is True
        except Exception:  # they can't be compared
            return False

    def __hash__(self) -> int:
        return hash(type(self.value))
