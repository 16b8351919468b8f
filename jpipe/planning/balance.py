"""Checks `balance=`, and decides what is to be equal on all stages; where the cuts lie then, `partition` says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jpipe.planning.costs import Cost
from jpipe.planning.partition import Partition, checked_costs, partition, partition_from_counts
from jpipe.users_numbers import integer_or_none

Balance = str | tuple[int, ...] | tuple[float, ...]
"""A name, the number of layers of each virtual stage, or the cost of each layer."""


class Measure(NamedTuple):
    """A quantity that a measured balance makes equal on all stages.

    Attributes:
      of: a layer's cost -> the number to be shared out evenly.
      unit: what `layer_costs` measures forward and backward in: "flops" or "time".
      counts: whether the number follows from FLOPs, so that users are warned of layers whose can't be counted.
      negligible: the cost of a whole model for a micro-batch up to which nobody is warned that no cut balances it.
    """

    of: Callable[[Cost], float]
    unit: str = "flops"
    counts: bool = False
    negligible: float = 0.0


# A CPU core does a million operations in about a tenth of a millisecond, no more than a tick takes whatever it
# computes, so that no balance could be felt.
MEASURES = {
    "flops": Measure(lambda cost: cost.total, counts=True, negligible=1e6),
    "time": Measure(lambda cost: cost.total, unit="time"),
    "size": Measure(lambda cost: cost.size, negligible=1e6),
}
"""The balances that are measured, by name."""

BALANCES = (*MEASURES, "even")


def as_balance(balance: object, num_layers: int | None, num_parts: int) -> Balance:
    """Checks the user's balance as far as it can be without shapes, and without the number of layers, if that is None.

    Raises:
      ValueError: an unknown name, counts that don't fit (length, sum, zeros), or costs that don't.
      TypeError: neither a name nor a sequence of numbers.
    """
    if isinstance(balance, str):
        if balance not in BALANCES:
            raise ValueError(
                f"balance={balance!r} is unknown; use one of {list(BALANCES)}, layer counts such as [4, 5, 5, 4], or "
                "one cost a layer as floats"
            )
        return balance
    if isinstance(balance, Partition):
        raise TypeError("balance is a Partition; pass its layer counts: balance=partition.counts")
    values: tuple = (None,)
    if isinstance(balance, Iterable) and np.ndim(np.asarray(balance, object)) == 1:
        values = tuple(value.item() if hasattr(value, "item") else value for value in balance)
    if any(not isinstance(value, float) and integer_or_none(value) is None for value in values):
        raise TypeError(f"balance={balance!r} is neither one of {list(BALANCES)} nor a list of layer counts or costs")
    if num_layers is None:
        return values
    if any(isinstance(value, float) for value in values):
        if len(values) != num_layers:
            raise ValueError(
                f"balance has {len(values)} costs but there are {num_layers} layers; give one cost (a float) a layer"
            )
        return checked_costs(values, "balance")
    _check_counts(values, num_layers, num_parts)
    return values


def _check_counts(values: tuple[int, ...], num_layers: int, num_parts: int) -> None:
    such_as = f"such as {list(partition([1.0] * num_layers, num_parts).counts)}"
    if len(values) != num_parts:
        raise ValueError(
            f"balance={list(values)} has {len(values)} layer counts; give num_stages * num_chunks = {num_parts} of "
            f"them, {such_as} (or one cost a layer, as floats)"
        )
    if any(value < 1 for value in values):
        raise ValueError(
            f"balance={list(values)} has a stage without layers; every count has to be at least 1, {such_as}"
        )
    if sum(values) != num_layers:
        raise ValueError(
            f"balance={list(values)} sums to {sum(values)} but there are {num_layers} layers; give counts that sum to "
            f"{num_layers}, {such_as}"
        )


def _counts(balance: Balance) -> tuple[int, ...] | None:
    """The layers of each virtual stage, if the user counted them out."""
    counts = () if isinstance(balance, str) else tuple(value for value in balance if isinstance(value, int))
    return counts or None


def measure_of(balance: Balance) -> Measure | None:
    """The quantity measured of the layers; None if none is. If the user counted layers out, FLOPs are shown."""
    name = balance if isinstance(balance, str) else "flops" if _counts(balance) else ""
    return MEASURES.get(name)


def unmeasured_costs(balance: Balance, num_layers: int) -> tuple[float, ...]:
    """`[N]`, the layers' costs where none are measured: the user's own, else 1.0 each.

    >>> unmeasured_costs("even", 2), unmeasured_costs((1, 1), 2), unmeasured_costs((3.0, 4.0), 2)
    ((1.0, 1.0), (1.0, 1.0), (3.0, 4.0))
    """
    return (1.0,) * num_layers if isinstance(balance, str) or _counts(balance) else tuple(map(float, balance))


def cut_layers(balance: Balance, costs: Sequence[float], num_stages: int, num_chunks: int) -> Partition:
    """The cuts for a balance: the best for these costs, or where the user wants them.

    Args:
      balance: as checked by `as_balance`.
      costs: `[N]`, what is to be shared out evenly.
      num_stages: K.
      num_chunks: V.
    """
    counts = _counts(balance)
    if counts:
        return partition_from_counts(counts, costs, num_chunks)
    return partition(costs, num_stages, num_chunks=num_chunks)
