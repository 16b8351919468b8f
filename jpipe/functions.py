"""What can be known of a user's function: what its signature asks for, and whether two are the same."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any


def mode_arguments(
    function: Callable, train: bool, taken: Callable[[str], bool] = lambda name: False
) -> dict[str, bool]:
    """The keyword arguments that tell `function` whether it trains, of those that its signature names.

    Args:
      function: whose signature is read.
      train: training (True) or evaluation (False).
      taken: tells which names the user has fixed already.
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
    """The parameters of `function` by name, but for those fixed by `functools.partial`.

    Empty for functions that Python can't inspect.
    """
    fixed = function.keywords if isinstance(function, functools.partial) else {}
    try:
        return {name: p for name, p in inspect.signature(function).parameters.items() if name not in fixed}
    except (TypeError, ValueError):
        return {}


def same_function(a: Any, b: Any) -> bool:
    """Whether both are the same function, or made by the same line of code from the same values.

    >>> adders = [lambda x: x + 1 for _ in range(2)]
    >>> same_function(*adders)
    True
    """
    if a is b or not (isinstance(a, FunctionType) and isinstance(b, FunctionType)):
        return a is b or a == b
    values = lambda f: (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values(), *_enclosed(f))
    pairs = list(itertools.zip_longest(values(a), values(b)))
    plain = (int, float, str, bool, type(None))
    return (a.__code__, a.__globals__ is b.__globals__) == (b.__code__, True) and all(
        x is y or (type(x) is type(y) and isinstance(x, plain) and x == y) for x, y in pairs
    )


def _enclosed(function: FunctionType) -> list[Any]:
    """The values of the variables around a function that it uses."""
    try:
        return [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # one isn't set yet
        return [function]
