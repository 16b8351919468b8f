"""Checks numbers that users pass (counts, bytes, seconds), and makes them Python's own int or float.

Counts are what `operator.index` takes, as NumPy has it for its sizes: integers of Python, NumPy and JAX, and no floats.
Bytes, seconds and costs are any real number. A bool is neither.
"""

from __future__ import annotations

import math
import operator
from typing import SupportsFloat, SupportsIndex, cast

import numpy as np


def as_integer(name: str, value: object, remedy: str, *, least: int = 1) -> int:
    """A count as an int.

    Args:
      name: what errors call it.
      value: the user's.
      remedy: what to pass instead, in words.
      least: the smallest that there may be.

    Raises:
      TypeError: it is no integer.
      ValueError: it is less than `least`.

    >>> as_integer("num_stages", 4, "use 1 or more")
    4
    """
    if (number := integer_or_none(value)) is None:
        raise TypeError(f"{name}={value!r:.60} is no integer; {remedy}")
    if number < least:
        raise ValueError(f"{name}={number} is less than {least}; {remedy}")
    return number


def integer_or_none(value: object) -> int | None:
    """An integer as an int; None of anything else.

    >>> integer_or_none(4), integer_or_none(4.0), integer_or_none(True)
    (4, None, None)
    """
    try:
        return None if isinstance(value, bool) else operator.index(cast(SupportsIndex, value))
    except TypeError:
        return None


def as_number(name: str, value: object, remedy: str, *, positive: bool = False, finite: bool = True) -> float:
    """A real number from 0 on as a float.

    Args:
      name: what errors call it.
      value: the user's.
      remedy: what to pass instead, in words.
      positive: whether it has to be more than 0.
      finite: whether it has to be less than infinity.

    Raises:
      TypeError: it is no number, but a text, a bool or several numbers, say.
      ValueError: it is negative, NaN, or what the arguments exclude.

    >>> as_number("memory", 16e9, "give bytes")
    16000000000.0
    """
    refusal = TypeError(f"{name}={value!r:.60} is no number; {remedy}")
    is_bool = isinstance(value, bool) or getattr(value, "dtype", None) == np.dtype(bool)
    if is_bool or isinstance(value, str | bytes) or getattr(value, "shape", ()) != ():
        raise refusal
    try:
        number = float(cast(SupportsFloat, value))
    except (TypeError, ValueError):
        raise refusal from None
    if not (number > 0 if positive else number >= 0) or (finite and math.isinf(number)):
        wanted = ("more than 0" if positive else "at least 0") + " and finite" * finite
        raise ValueError(f"{name}={value!r:.60} has to be {wanted}; {remedy}")
    return number
