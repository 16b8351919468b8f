"""Warns at the line of the user's own code, from however deep in the package."""

from __future__ import annotations

import functools
import sys
import warnings


def warn_user(message: str) -> None:
    """Gives a UserWarning at the line of the code that called the package."""
    warnings.warn(message, UserWarning, stacklevel=_users_level())


@functools.cache
def warn_once(message: str) -> None:
    """Warns as `warn_user` does, but gives each message once in a program."""
    warn_user(message)


def _users_level() -> int:
    """How many frames above `warn_user` the caller of the package is, as `warnings` counts."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("jpipe", "jax", "contextlib"):
        level, frame = level + 1, frame.f_back
    return level
