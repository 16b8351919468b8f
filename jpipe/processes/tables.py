"""Prints tables as text and as HTML, for terminals and notebooks, from the same rows."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from textwrap import fill

WIDTH = 120
"""Columns of a terminal that texts fit."""
DOTS = "..."
"""The sign for a text's middle that is left out."""


@dataclass(frozen=True)
class Table:
    """A table to look at.

    Attributes:
      title: the line above it.
      header: the names of the columns.
      rows: their texts, as many as names.
      marks: by the index of a row, a remark on it.
      notes: the lines below it.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    marks: dict[int, str]
    notes: Sequence[str] = ()

    def text(self) -> str:
        """Columns aligned to the right, marks behind their rows, in at most `WIDTH` columns if it can; without title.

        The middle of a text is left out where its column would be too wide; `html` has all of it.

        >>> print(Table("costs", ("stage", "cost"), [("0", "7"), ("1", "14")], {1: "slowest"}).text())
        stage  cost
            0     7
            1    14  <- slowest
        """
        lines = [self.header, *self.rows]
        needed = [max(map(len, column)) for column in zip(*lines, strict=True)]
        room = WIDTH - 2 * (len(needed) - 1) - max((5 + len(mark) for mark in self.marks.values()), default=0)
        most = next((most for most in range(max(needed), 8, -1) if sum(min(most, n) for n in needed) <= room), 8)
        widths = [min(most, n) for n in needed]
        texts = ["  ".join(map(_fitted, line, widths)) for line in lines]
        for row, mark in self.marks.items():
            texts[1 + row] += f"  <- {mark}"
        left_out = [f'"{DOTS}" stands for text that is too wide here; a notebook shows all of it'] * (widths != needed)
        return "\n".join([*texts, *map(folded, [*self.notes, *left_out])])

    def described(self) -> str:
        """The text below the title."""
        return f"{folded(self.title)}\n{self.text()}"

    def html(self) -> str:
        """A `<table>` that needs nothing but itself; all texts are escaped, rows with marks are bold."""
        head, rows = "".join(f"<th>{escape(name)}</th>" for name in self.header), []
        for index, row in enumerate(self.rows):
            mark = self.marks.get(index)
            style = "text-align: right" + ("; font-weight: bold" if mark else "")
            cells = "".join(f'<td style="{style}">{escape(text)}</td>' for text in row)
            rows.append(f'<tr title="{escape(mark)}">{cells}</tr>' if mark else f"<tr>{cells}</tr>")
        notes = "".join(f"<div>{escape(note)}</div>" for note in self.notes)
        return (
            f'<div><div style="font-weight: bold">{escape(self.title)}</div>'
            f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{notes}</div>"
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


def _fitted(text: str, width: int) -> str:
    """A text of this width, aligned to the right; the middle of a longer one is left out."""
    kept = width - len(DOTS)
    return text.rjust(width) if len(text) <= width else text[: kept - kept // 2] + DOTS + text[len(text) - kept // 2 :]


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
