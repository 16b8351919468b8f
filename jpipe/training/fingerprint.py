"""When two functions made anew are sure to be the same, so that what was compiled for one serves the other.

An optax transformation is a pair of closures: made twice from the same values, it is two objects that aren't equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import jax
import numpy as np

LIBRARIES = ("jpipe", "optax", "jax", "flax", "chex", "numpy", "builtins")
"""Packages in which nothing changes while Python runs, so that their functions depend on their arguments alone."""


@lru_cache(maxsize=32)
def fingerprint(value: Any) -> Hashable:
    """Something hashable that is equal for two values only if they are sure to be the same.

    Functions are the same if their code is, and their defaults, the variables that they enclose and the global ones
    that they name; numbers, if they are of one type and have the same bits; tuples, lists and dictionaries, if what is
    in them now is the same. What may have changed in the meantime (other objects, other modules) is equal to nothing.

    >>> def scale(by):
    ...     return lambda x: x * by
    >>> fingerprint(scale(2)) == fingerprint(scale(2)), fingerprint(scale(2)) == fingerprint(scale(2.0))
    (True, False)
    """
    return _fingerprint(value, ())


def _fingerprint(value: Any, within: tuple[int, ...]) -> Hashable:
    """`fingerprint` of a value inside of others, whose ids are `within`, the outermost first."""
    if id(value) in within:  # a function that names itself
        return ("again", len(within) - within.index(id(value)))
    within = (*within, id(value))
    if type(value) in (type(None), bool, int, str, bytes):
        return (type(value), value)
    if type(value) is float:
        return (float, value.hex())
    if isinstance(value, tuple | list):
        return (type(value), *(_fingerprint(item, within) for item in value))
    if type(value) is dict:
        return (dict, *((_fingerprint(k, within), _fingerprint(v, within)) for k, v in value.items()))
    if isinstance(value, FunctionType):
        return _of_function(value, within)
    never_changes = isinstance(value, jax.Array | np.dtype | np.ufunc)
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    in_library = isinstance(value, type | ModuleType) and _is_library(module)
    return _SameObject(value) if never_changes or in_library else object()


def _of_function(function: FunctionType, within: tuple[int, ...]) -> Hashable:
    try:
        enclosed = [variable.cell_contents for variable in function.__closure__ or ()]
    except ValueError:  # a variable isn't set yet
        return object()
    named: list[Any] = []
    if not _is_library(function.__module__):
        named = [function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__]
    parts = (function.__defaults__, function.__kwdefaults__, enclosed, named)
    code = (function.__code__, _SameObject(function.__globals__))
    return (FunctionType, *code, *(_fingerprint(part, within) for part in parts))


def _names(code: CodeType) -> Iterator[str]:
    """The global variables and attributes that code names, or code inside of it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _is_library(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in LIBRARIES


class _SameObject:
    """Equal to another one if both hold the very same object, which they keep alive."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameObject) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
