"""What a user's function asks for, by the names in its signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

ModeArguments = dict[str, Any]
"""Booleans by keyword, for functions that may also take others."""


def mode_arguments(function: Callable, train: bool, taken: Callable[[str], bool] = lambda name: False) -> ModeArguments:
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
