"""What was seen of each variant: rows, the file that keeps them, and tables of them.

Run by itself it prints the tables of `benchmarks/data/peers.csv`, as the pages have them.
"""

import csv
from itertools import groupby
from math import nan
from pathlib import Path
from typing import NamedTuple

KEPT = Path(__file__).parents[1] / "data" / "peers.csv"
ALONE = ("single", "hand")
"""Variants of one device begin with one of these words."""


class Row(NamedTuple):
    """One variant in one run.

    Attributes:
      run: the run's name; only rows of one run are compared.
      peer: whose it is.
      variant: its words.
      width: of the model.
      microbatches: M.
      where: processes, and how many cores they have.
      steps: how many were timed while nothing else ran, or of all if these were fewer than three.
      first: seconds of the first step, tracing and compiling included.
      shortest: seconds.
      median: seconds.
      processor: median processor seconds of all its processes.
      peak: MiB that its largest process held.
      loss: after three steps.
      memory: how processes were given memory, of `MEMORY` in turns.py.
      quiet: whether at least three steps had the machine to themselves; if not, all that were timed count.
    """

    run: str
    peer: str
    variant: str
    width: int
    microbatches: int
    where: str
    steps: int
    first: float
    shortest: float
    median: float
    processor: float
    peak: float
    loss: float
    memory: str
    quiet: bool

    @property
    def alone(self) -> bool:
        """Whether it is a step of one device."""
        return self.variant.startswith(ALONE)


def write(rows: list[Row], path: Path) -> None:
    """Adds rows to a file; those of the same run that it had are replaced."""
    runs = {row.run for row in rows}
    before = [row for row in read(path) if row.run not in runs] if path.exists() else []
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([Row._fields, *before, *rows])


def read(path: Path = KEPT) -> list[Row]:
    with path.open() as file:
        return [Row(*(kind(text) for kind, text in zip(KINDS, row, strict=True))) for row in [*csv.reader(file)][1:]]


KINDS = (str, str, str, int, int, str, int, *[float] * 6, str, lambda text: text == "True")


def report(rows: list[Row]) -> list[str]:
    """The lines of one run's table; speed-ups are over the peer's own best step of one device, by the shortest.

    A star behind the shortest step marks a row that isn't `quiet`: other programs ran during its steps.
    """
    m = rows[0].microbatches
    ideal = 2 * m / (m + 1)
    shortest = lambda peer, alone: min((r.shortest for r in rows if (r.peer, r.alone) == (peer, alone)), default=nan)
    best, ours = {row.peer: shortest(row.peer, True) for row in rows}, shortest("jpipe", False)
    columns = (rows[0].run, "on cores", "first", "shortest", "median", "work")
    columns += ("speed-up", f"of {ideal:.3f}", "of jpipe's", "MiB")
    lines = [f"| {' | '.join(columns)} |", f"{'|---' * len(columns)}|"]
    for row in rows:
        speedup = best[row.peer] / row.shortest
        gain = " | | " if row.alone else f" {speedup:.2f} | {speedup / ideal:.2f} | {row.shortest / ours:.2f} "
        star = "" if row.quiet else "*"
        times = f"{row.first:.1f} | {row.shortest:.3f}{star} | {row.median:.3f} | {row.processor:.2f}"
        lines.append(f"| {row.peer} `{row.variant}` | {row.where} | {times} |{gain}| {row.peak:.0f} |")
    return lines


def tables(rows: list[Row]) -> list[list[str]]:
    """A table for each run."""
    return [report(list(found)) for _, found in groupby(rows, key=lambda row: row.run)]


def summary(rows: list[Row]) -> list[str]:
    """The lines of a table of each peer's best pipelined step in each run, for benchmarks/results/peers.md."""
    lines = [
        "| run | peer | its best step of one device, s | two stages, s | speed-up | over jpipe's |",
        "|---|---|---|---|---|---|",
    ]
    for run, found in groupby(rows, key=lambda row: row.run):
        mine: dict[str, list[Row]] = {}
        for row in found:
            mine.setdefault(row.peer, []).append(row)
        best = {
            (peer, alone): min((row for row in theirs if row.alone == alone), key=lambda row: row.shortest)
            for peer, theirs in mine.items()
            for alone in (True, False)
        }
        for peer in mine:
            alone, both, ours = best[peer, True], best[peer, False], best["jpipe", False]
            figures = (f"{alone.shortest:.3f}", f"{both.shortest:.3f}", f"{alone.shortest / both.shortest:.2f}")
            ratio = f"{both.shortest / ours.shortest:.2f}"
            lines.append(f"| {run} | {peer} `{both.variant}` | {' | '.join(figures)} | {ratio} |")
    return lines


def main() -> None:
    print("\n\n".join("\n".join(lines) for lines in [*tables(read()), summary(read())]))


if __name__ == "__main__":
    main()
