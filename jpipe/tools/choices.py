"""The settings that `jpipe.plan` chooses among, what is predicted of them, their table, why the first is ahead."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

from jpipe.model.remat import Policy
from jpipe.partitioner.axes import AXIS
from jpipe.processes.tables import Table, Tabular, bytes_in_words, ms_in_words
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


def word_of(value: object) -> str:
    """The user's value as a word: a schedule or a policy by its name."""
    return value.name if isinstance(value, Schedule) else getattr(value, "__name__", str(value))


# --- choices ----------------------------------------------------------------------------------------------------------


FELT = 0.01
"""The part of what the first choice gains on the second from which on a part of the step is worth a word."""


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
    def seconds(self) -> float:
        """The predicted seconds of a step."""
        return self.cost.step

    @property
    def bubble_fraction(self) -> float:
        """The share of the time in which a stage waits for others, predicted."""
        return self.cost.bubble_fraction

    @property
    def words(self) -> str:
        """Its settings in a line."""
        chosen = self.setting
        axes = ", ".join(f"{name}={size}" for name, size in chosen.axes if size > 1 or name == AXIS)
        schedule = word_of(chosen.schedule) + f" V={chosen.num_chunks}" * (chosen.num_chunks > 1)
        over = f", shard_over={'+'.join(chosen.shard_over)}" * bool(chosen.shard_over)
        remat = word_of(chosen.remat)
        return f"{axes}, M={chosen.num_microbatches}, {schedule}, remat={remat}, ends={chosen.ends}{over}"

    def column(self) -> dict[str, str]:
        """The entries of this choice in a table."""
        chosen, cost = self.setting, self.cost
        rows = {name: str(size) for name, size in chosen.axes}
        rows |= {"M": str(chosen.num_microbatches), "schedule": word_of(chosen.schedule), "V": str(chosen.num_chunks)}
        rows |= {"remat": word_of(chosen.remat), "ends": chosen.ends, "shard_over": ", ".join(chosen.shard_over) or "-"}
        rows |= {"layers": _of_stages(self.options["balance"])}
        rows |= {"ms a step": ms_in_words(self.seconds), "bubble": f"{self.bubble_fraction:.1%}"}
        rows |= {name: text for name, text, _ in cost.rows_of_seconds()[:-1]}
        rows |= {"a device": bytes_in_words(self.total_bytes), "limit": self.limit or "-"}
        rows |= {name: text for name, text, _ in [*cost.rows_of_bytes()[:-1], *cost.rows_on_host()]}
        return rows


@dataclass(frozen=True)
class Choices(Tabular, Sequence[Choice]):
    """The best choices, the fastest first; printed, or shown in a notebook, they are a table.

    Attributes:
      title: what the plans are for.
      choices: the choices.
      advice: why the first choice is ahead of the second, and the warnings that planning it gave.
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
        return Table(self.title, ("", *(f"{i + 1}." for i in range(len(columns)))), rows, {}, self.advice)


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
    for choice in sorted(choices, key=lambda choice: (choice.seconds, choice.total_bytes)):
        if not kept or choice.total_bytes < kept[-1].total_bytes:
            kept.append(choice)
    return kept


def ahead(first: Choice, second: Choice) -> str:
    """Why the first choice is ahead of the second: the parts of the step that are shorter or longer, by how much."""
    gain, names = second.seconds - first.seconds, {**first.time, **second.time}
    gains = {name: second.time.get(name, 0.0) - first.time.get(name, 0.0) for name in names}
    felt = sorted((name for name in gains if abs(gains[name]) > FELT * gain), key=lambda name: -abs(gains[name]))
    words = [f"{ms_in_words(abs(gains[name]))} ms {'less' if gains[name] > 0 else 'more'} {name}" for name in felt]
    return f"1. takes {ms_in_words(gain)} ms less than 2.: {', '.join(words)}"
