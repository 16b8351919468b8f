"""`StepCost`: what a step of training takes, seconds by slice and bytes by part, and the table that shows it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from jpipe.processes.tables import Table, Tabular, bytes_in_words, ms_in_words
from jpipe.schedules.simulate import Timeline

Number = TypeVar("Number", int, float)


class Parts(dict[str, Number]):
    """Amounts by part, which add up.

    >>> held = Parts(parameters=4, residuals=2)
    >>> held["parameters"], held.total, held
    (4, 6, {'parameters': 4, 'residuals': 2})
    """

    @property
    def total(self) -> Number:
        """All parts together."""
        return cast("Number", sum(self.values()))


Row = tuple[str, str, str]
"""The name of a part, how much it is, and its share of all parts."""


@dataclass(frozen=True)
class StepCost(Tabular):
    """The cost of a step of training; printed, or shown in a notebook, it is a table.

    Attributes:
      source: where the numbers come from: "predicted", "compiled" or "measured".
      seconds: the seconds of a stage, on average, by what they go into; empty if they aren't known.
      bytes: the bytes on a device, by what holds them; empty if they aren't known.
      timeline: the schedule with the times that the seconds follow from, if there is one.
      notes: lines below the table.
      host: a device's part of the bytes on its host, by what holds them; empty if nothing lies there.
    """

    source: str
    seconds: Parts[float]
    bytes: Parts[int]
    timeline: Timeline | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()
    host: Parts[int] = field(default_factory=Parts[int])

    @property
    def step(self) -> float:
        """Seconds of the step."""
        return self.seconds.total

    @property
    def bubble_fraction(self) -> float:
        """The share of the time in which a stage waits for others; ends that all stages compute together are work."""
        return self.seconds["bubble"] / ((self.seconds["bubble"] + self.seconds["computation"]) or 1.0)

    def gain_over(self, other: "StepCost") -> str:
        """How much less this step takes than another, and of what: the parts that are a hundredth of it or more."""
        gain, names = other.step - self.step, {**self.seconds, **other.seconds}
        gains = {name: other.seconds.get(name, 0.0) - self.seconds.get(name, 0.0) for name in names}
        felt = sorted((name for name in gains if abs(gains[name]) > gain / 100), key=lambda name: -abs(gains[name]))
        words = [f"{ms_in_words(abs(gains[name]))} ms {'less' if gains[name] > 0 else 'more'} {name}" for name in felt]
        return f"{ms_in_words(gain)} ms: {', '.join(words)}"

    def table(self) -> Table:
        """Seconds by slice and bytes by part, with their shares."""
        rows = _rows("ms: {}", self.seconds, ms_in_words, "step") + _rows("{}", self.bytes, bytes_in_words, "all")
        rows += _rows("on the host: {}", self.host, bytes_in_words)
        header = ("of a device", self.source, "share")
        return Table("A training step, by what its time goes into, and what it holds", header, rows, self.notes)

    _table = table


@dataclass(frozen=True)
class Predicted:
    """A step that wasn't run.

    Attributes:
      fits: whether its devices, and their hosts, have room for it.
      cost: seconds of the step and bytes of a device, by part.
    """

    fits: bool
    cost: StepCost

    @property
    def bytes(self) -> dict[str, int]:
        """The bytes on a device, by part."""
        return {name.replace("_", " "): size for name, size in self.cost.bytes.items()}

    @property
    def total_bytes(self) -> int:
        """The bytes on a device, all parts together."""
        return self.cost.bytes.total

    @property
    def seconds(self) -> float | None:
        """Seconds of a step; None if they aren't known."""
        return self.cost.step if self.cost.seconds else None

    @property
    def bubble_fraction(self) -> float | None:
        """The share of the time in which a stage waits for others; None if it isn't known."""
        return self.cost.bubble_fraction if self.cost.seconds else None


def _rows(name: str, parts: Parts, in_words: Callable[[float], str], total: str = "") -> list[Row]:
    """A row for each part, and one for all of them, if that has a name."""
    amounts = {**parts, total: parts.total} if total and parts else parts
    share = lambda amount: f"{amount / parts.total:.1%}" if parts.total else "-"
    return [(name.format(part.replace("_", " ")), in_words(n), share(n)) for part, n in amounts.items()]
