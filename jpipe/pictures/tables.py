"""Tables of text and of HTML, for terminals and notebooks, from the same rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Table:
    """A table to look at.

    Attributes:
      title: what it is a table of.
      header: the names of the columns.
      rows: their texts, as many as names.
      marks: by row what is remarkable about it.
      notes: what stands below.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    marks: dict[int, str]
    notes: Sequence[str] = ()

    def text(self) -> str:
        """Columns aligned to the right, marks behind their rows; without the title.

        >>> print(Table("costs", ("stage", "cost"), [("0", "7"), ("1", "14")], {1: "slowest"}).text())
        stage  cost
            0     7
            1    14  <- slowest
        """
        lines = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        texts = ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines]
        for row, mark in self.marks.items():
            texts[1 + row] += f"  <- {mark}"
        return "\n".join([*texts, *self.notes])

    def described(self) -> str:
        """The text below the title."""
        return f"{self.title}\n{self.text()}"

    def html(self) -> str:
        """A `<table>` that needs nothing but itself; all texts are escaped, rows with marks are bold."""
        head = "".join(f"<th>{escape(name)}</th>" for name in self.header)
        body = "".join(self._html_row(index, row) for index, row in enumerate(self.rows))
        notes = "".join(f"<div>{escape(note)}</div>" for note in self.notes)
        return (
            f'<div><div style="font-weight: bold">{escape(self.title)}</div>'
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}</div>"
        )

    def _html_row(self, index: int, row: Sequence[str]) -> str:
        mark = self.marks.get(index)
        style = "text-align: right" + ("; font-weight: bold" if mark else "")
        title = f' title="{escape(mark)}"' if mark else ""
        return f"<tr{title}>" + "".join(f'<td style="{style}">{escape(text)}</td>' for text in row) + "</tr>"
