"""What can be known of a user's function: what its signature asks for, and whether two are the same."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import numpy as np


def mode_arguments(
    function: Callable, train: bool, taken: Callable[[str], bool] = lambda name: False
) -> dict[str, bool]:
    """The keyword arguments that tell `function` whether it trains: those of the known ones that its signature names.

    Args:
      function: any callable.
      train: training (True) or evaluation (False).
      taken: whether the user has given an argument of this name already; it is left out then.
    """
    known = {
        "train": train,
        "training": train,
        "is_training": train,
        "deterministic": not train,
        "use_running_average": not train,
    }
    parameters = signature_of(function)
    return {name: value for name, value in known.items() if name in parameters and not taken(name)}


def signature_of(function: Callable) -> Mapping[str, inspect.Parameter]:
    """The parameters of `function` by name, but for those fixed by `functools.partial`; a class's are its `__init__`'s.

    Empty for functions that Python can't inspect.
    """
    fixed = function.keywords if isinstance(function, functools.partial) else {}
    inner = function.func if isinstance(function, functools.partial) else function
    try:
        described = inspect.signature(inner.__init__ if isinstance(inner, type) else function)
    except (TypeError, ValueError):
        return {}
    return {name: p for name, p in described.parameters.items() if name not in fixed}


def same_value(a: Any, b: Any, pending: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Whether two Python values have the same types and bits all the way down, so that code can't tell them apart.

    Unlike `==`, which takes 0.0 for -0.0, 1 for True, and nan for another value than itself. Arrays are the same only
    if they are one object.

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
    if first is None or second is None:
        return _equal(a, b)
    pending |= {(id(a), id(b))}
    return len(first) == len(second) and all(same_value(x, y, pending) for x, y in zip(first, second, strict=True))


def values_within(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """The value and everything that it consists of, as `same_value` compares it.

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


def _equal(a: Any, b: Any) -> bool:
    """Whether two values of one type are equal; False if they can't be compared, as arrays."""
    try:
        return (a == b) is True
    except Exception:
        return False


def _parts(value: Any) -> list[Any] | None:
    """The values that this one consists of, to be compared one by one; None if it is compared as a whole."""
    match value:
        case float() | complex() | np.generic():
            return [str(np.asarray(value).dtype), np.asarray(value).tobytes()]
        case tuple() | list():
            return list(value)
        case Mapping():
            return [part for item in value.items() for part in item]
        case set() | frozenset():
            return sorted(map(_with_type, value))
        case functools.partial():
            return [value.func, value.args, value.keywords]
        case FunctionType():
            return _parts_of_function(value)
    if dataclasses.is_dataclass(value) and type(value).__eq__ is not object.__eq__:
        # Linen modules are dataclasses; the module that one is a part of is no part of it.
        return [getattr(value, field.name, None) for field in dataclasses.fields(value) if field.name != "parent"]
    return None


def _with_type(value: Any) -> str:
    return f"{type(value)} {value!r}"


def _parts_of_function(function: FunctionType) -> list[Any]:
    """The code of a function, and all values that it finds outside of its arguments."""
    try:
        enclosed = [variable.cell_contents for variable in function.__closure__ or ()]
    except ValueError:  # a variable isn't set yet
        enclosed = [object()]
    defaults = [function.__defaults__, function.__kwdefaults__]
    return [function.__code__, id(function.__globals__), *defaults, enclosed, function.__dict__]
