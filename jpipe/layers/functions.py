"""Reads the signature of a user's function: by which word (`train`, `deterministic`) it is told its mode."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping

ModeArguments = dict[str, bool]
"""Booleans by keyword, for functions that may also take others."""

IN_TRAINING: tuple[str, ...] = ("train", "training", "is_training", "is_train", "enable_dropout", "apply_dropout")
IN_EVALUATION: tuple[str, ...] = ("deterministic", "use_running_average", "is_eval", "eval_mode", "inference")
"""Names of arguments that tell a layer its mode: those that are True in training, and those that are in evaluation."""

MODE_NAMES = f"{', '.join((*IN_TRAINING, *IN_EVALUATION[:-1]))} or {IN_EVALUATION[-1]}"


def mode_arguments(function: Callable, train: bool, taken: Callable[[str], bool] = lambda name: False) -> ModeArguments:
    """Picks the keyword arguments that tell `function` whether it trains: the known ones that its signature names.

    Args:
      function: any callable.
      train: training (True) or evaluation (False).
      taken: whether the user has given an argument of this name already; it is left out then.
    """
    parameters = signature_of(function)
    return {name: value for name, value in modes(train).items() if name in parameters and not taken(name)}


def modes(train: bool) -> ModeArguments:
    """Gives every argument that tells a mode its value, in training or in evaluation."""
    return dict.fromkeys(IN_TRAINING, train) | dict.fromkeys(IN_EVALUATION, not train)


def signature_of(function: Callable) -> Mapping[str, inspect.Parameter]:
    """Reads the parameters of `function` by name, without those that `functools.partial` fixes; a class's `__init__`'s.

    Empty for functions that Python can't inspect.
    """
    fixed = function.keywords if isinstance(function, functools.partial) else {}
    inner = function.func if isinstance(function, functools.partial) else function
    try:
        described = inspect.signature(inner.__init__ if isinstance(inner, type) else function)
    except (TypeError, ValueError):
        return {}
    return {name: p for name, p in described.parameters.items() if name not in fixed}
