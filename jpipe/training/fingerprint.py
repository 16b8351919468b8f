"""When two functions made anew are sure to be the same, so that what was compiled for one serves the other.

An optax transformation is a pair of closures: made twice from the same values, it is two objects that aren't equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import jax
import numpy as np

LIBRARIES = ("jpipe", "optax", "jax", "flax", "chex", "numpy", "builtins")
"""Packages of which nothing changes while a program runs, so that their functions depend on their arguments alone."""


@lru_cache(maxsize=32)
def fingerprint(value: Any) -> Any:
    """Something hashable that is equal for two values only if they are sure to be the same.

    Functions are, if they are of the same code, and their defaults, the variables around them and the global ones that
    they name are the same; numbers, if they are of one type and have the same bits; tuples, lists and dictionaries, if
    what is in them is, now. What may have changed in the meantime (other objects, other modules) is equal to nothing.

    >>> def scale(by):
    ...     return lambda x: x * by
    >>> fingerprint(scale(2)) == fingerprint(scale(2)), fingerprint(scale(2)) == fingerprint(scale(2.0))
    (True, False)
    """
    return _fingerprint(value, ())


def _fingerprint(value: Any, within: tuple[int, ...]) -> Any:
    if id(value) in within:  # a function that calls itself
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
    of_library = isinstance(value, type | ModuleType) and _of_library(module)
    return _Itself(value) if never_changes or of_library else object()


def _of_function(function: FunctionType, within: tuple[int, ...]) -> Any:
    try:
        around = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a variable isn't set yet
        return object()
    named: list[Any] = []
    if not _of_library(function.__module__):
        named = [function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__]
    parts = (function.__defaults__, function.__kwdefaults__, around, named)
    code = (function.__code__, _Itself(function.__globals__))
    return (FunctionType, *code, *(_fingerprint(part, within) for part in parts))


def _names(code: CodeType) -> Iterator[str]:
    """What code, or code inside of it, names: global variables and attributes."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _of_library(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in LIBRARIES


class _Itself:
    """Equal to another of the very same value, which it keeps alive."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
