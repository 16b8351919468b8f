"""The settings that `jpipe.plan` chooses among, what is predicted of them, and their table."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

from jpipe.model.remat import Policy
from jpipe.partitioner.axes import AXIS
from jpipe.processes.tables import Table, Tabular
from jpipe.schedules.schedule import Schedule
from jpipe.tools.step_cost import Parts, Predicted

PINNED = ("num_stages", "num_microbatches", "schedule", "num_chunks", "remat", "ends", "shard_over")
"""The pipeline's arguments that a search varies; where one is given, it stays as it is."""


@dataclass(frozen=True)
class Setting:
    """A way to train a model on some devices.

    Attributes:
      axes: (name, devices) of each mesh axis, `stage` first.
      num_microbatches: M.
      schedule: its name, or the user's own.
      num_chunks: V.
      remat: its name, or a policy.
      ends: where the weights of the first and the last layer lie.
      shard_over: data axes that parameters are split over.
    """

    axes: tuple[tuple[str, int], ...]
    num_microbatches: int
    schedule: str | Schedule = "1f1b"
    num_chunks: int = 1
    remat: str | Policy = "layer"
    ends: str = "own"
    shard_over: tuple[str, ...] = ()

    @property
    def num_stages(self) -> int:
        """K."""
        return dict(self.axes)[AXIS]

    @property
    def options(self) -> dict[str, object]:
        """The arguments of `jpipe.Pipeline`, but for its mesh."""
        return {name: getattr(self, name) for name in PINNED}

    @property
    def in_words(self) -> dict[str, str]:
        """The sizes of mesh axes, and the arguments, by name; K is the size of `stage`."""
        named = [*self.axes, *self.options.items()]
        return {name: word_of(value) for name, value in named if name != "num_stages"}


def word_of(value: object) -> str:
    """The user's value as a word: a schedule or a policy by its name."""
    if isinstance(value, tuple):
        return ", ".join(value) or "-"
    return value.name if isinstance(value, Schedule) else getattr(value, "__name__", str(value))


# --- choices ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice(Predicted):
    """A setting, and what the models predict of it.

    Attributes:
      setting: the sizes of mesh axes, and the options that were searched.
      options: arguments of `jpipe.Pipeline`, those that `plan` was given too. A mesh is among them where this process
        has as many devices; else `setting.axes` says its sizes.
      cost: seconds of the step and bytes of a device, predicted; with the warnings that planning it gave.
      fits: whether these, and those on its host, are no more than there are.
    """

    setting: Setting
    options: dict[str, object]

    @property
    def time(self) -> Parts[float]:
        """The predicted seconds of a step, by part."""
        return self.cost.seconds

    @property
    def words(self) -> str:
        """Its settings in a line."""
        return ", ".join(f"{name}={word}" for name, word in self.setting.in_words.items())

    def column(self) -> dict[str, str]:
        """The entries of this choice in a table."""
        rows = {**self.setting.in_words, "layers": _of_stages(self.options["balance"])}
        rows["bubble"] = f"{self.cost.bubble_fraction:.1%}"
        return rows | {name: text for name, text, _ in self.cost._table().rows}


@dataclass(frozen=True)
class Choices(Tabular, Sequence[Choice]):
    """The best choices, the fastest first; printed, or shown in a notebook, they are a table.

    Attributes:
      title: what the plans are for.
      choices: the choices.
      advice: the warnings that planning the first one gave.
    """

    title: str
    choices: tuple[Choice, ...]
    advice: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.choices)

    @overload
    def __getitem__(self, index: int) -> Choice: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Choice, ...]: ...
    def __getitem__(self, index: int | slice) -> Choice | tuple[Choice, ...]:
        return self.choices[index]

    def _table(self) -> Table:
        columns = [choice.column() for choice in self.choices]
        names = dict.fromkeys(name for column in columns for name in column)
        rows = [(name, *(column.get(name, "-") for column in columns)) for name in names]
        return Table(self.title, ("", *(f"{i + 1}." for i in range(len(columns)))), rows, self.advice)


def _of_stages(counts: object) -> str:
    """How many layers virtual stages have; of more than eight the fewest and the most.

    >>> _of_stages([3, 2, 2, 1]), _of_stages([2] * 15 + [1])
    ('3,2,2,1', '1 to 2')
    """
    assert isinstance(counts, list)
    return ",".join(map(str, counts)) if len(counts) <= 8 else f"{min(counts)} to {max(counts)}"


def sorted_out(choices: Iterable[Choice]) -> list[Choice]:
    """Sorts choices by time, and keeps those that take less memory than all faster ones."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.cost.step, choice.total_bytes)):
        if not kept or choice.total_bytes < kept[-1].total_bytes:
            kept.append(choice)
    return kept
