"""Prints tables as text and as HTML, for terminals and notebooks, from the same rows."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from textwrap import fill

WIDTH = 120
"""Columns of a terminal that notes fit."""


@dataclass(frozen=True)
class Table:
    """A table to look at.

    Attributes:
      title: the line above it.
      header: the names of the columns.
      rows: their texts, as many as names.
      notes: the lines below it.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def text(self) -> str:
        """Columns aligned to the right, each as wide as its texts; without title.

        >>> print(Table("costs", ("stage", "cost", ""), [("0", "7", ""), ("1", "14", "<- slowest")]).text())
        stage  cost
            0     7
            1    14  <- slowest
        """
        lines = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        texts = ["  ".join(map(str.rjust, line, widths)).rstrip() for line in lines]
        return "\n".join([*texts, *map(folded, self.notes)])

    def described(self) -> str:
        """The text below the title."""
        return f"{folded(self.title)}\n{self.text()}"

    def html(self) -> str:
        """A `<table>` that needs nothing but itself; all texts are escaped."""
        head = "".join(f"<th>{escape(name)}</th>" for name in self.header)
        cell = lambda text: f'<td style="text-align: right">{escape(text)}</td>'
        rows = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in self.rows)
        notes = "".join(f"<div>{escape(note)}</div>" for note in self.notes)
        return (
            f'<div><div style="font-weight: bold">{escape(self.title)}</div>'
            f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{notes}</div>"
        )


def folded(text: str) -> str:
    """A text in lines of at most `WIDTH` columns."""
    return fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


class Tabular(ABC):
    """A result that is a table when it is printed, or shown in a notebook."""

    @abstractmethod
    def _table(self) -> Table: ...

    def __str__(self) -> str:
        return self._table().described()

    def _repr_html_(self) -> str:
        return self._table().html()


def bytes_in_words(count: float) -> str:
    """Bytes in the unit that suits their number, whatever that is.

    >>> bytes_in_words(96), bytes_in_words(22_632), bytes_in_words(3 * 2**30), bytes_in_words(math.inf)
    ('96 bytes', '22.1 KiB', '3.0 GiB', 'inf bytes')
    """
    power = min(4, max(0, math.frexp(count)[1] - 1) // 10)
    if not power:
        return f"{count:g} bytes"
    return f"{count / 2 ** (10 * power):,.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def ms_in_words(seconds: float) -> str:
    """Milliseconds with three digits that count, or all those before the point.

    >>> ms_in_words(12.3456), ms_in_words(0.0012345), ms_in_words(4.5678e-6), ms_in_words(0.0)
    ('12,346', '1.23', '0.00457', '0.00')
    """
    return f"{1e3 * seconds:#.3g}" if 1e3 * seconds < 99.95 else f"{1e3 * seconds:,.0f}"
