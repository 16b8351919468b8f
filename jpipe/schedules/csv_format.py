"""Reads and writes orders of actions as PyTorch's CSV files (`torch.distributed.pipelining`, "compute_only").

A cell names a virtual stage, a kind and a micro-batch, as "5F0", and is empty where the stage idles. The kinds are
those of `jpipe.schedules.actions`; PyTorch has no R. Two actions that PyTorch runs together, "(0F7;7B3)OVERLAP_F_B",
run one after the other here.
"""

import csv
import io
import re

from jpipe.schedules.actions import ACTION_KINDS, Action
from jpipe.schedules.placement import STYLES, Placement
from jpipe.schedules.timing import Orders


def write_csv(orders: Orders) -> str:
    """The orders as text, a column for each slot in time."""
    times = orders.slot_times
    rows = [[""] * (max(times.values()) + 1) for _ in orders.actions]
    for (stage, (kind, microbatch, chunk)), tau in times.items():
        rows[stage][tau] = f"{orders.placement.virtual_stage(stage, chunk)}{kind}{microbatch}"
    return "".join(",".join(row) + "\n" for row in rows)


def read_csv(text: str) -> tuple[list[list[Action]], str]:
    """Returns each row's actions in order, and the first style of placement that fits the rows' virtual stages.

    Raises:
      TypeError: `text` is no string.
      ValueError: it has no rows, a cell is no action, or the rows' virtual stages fit no style; the message names it.
    """
    if not isinstance(text, str):
        raise TypeError(f"a schedule is read from text, got {type(text).__name__}; pass Path(...).read_text()")
    rows = list(csv.reader(io.StringIO(text.rstrip())))
    if not rows:
        raise ValueError("the CSV is empty; it has a row of cells for each stage, as 0F0,0F1,0B0,0B1")
    orders = [[part for i, cell in enumerate(row) for part in _parts(cell, k, i)] for k, row in enumerate(rows)]
    virtual_stages = [sorted({s for s, _, _ in order}) for order in orders]
    num_chunks = max(map(len, virtual_stages))
    for style in STYLES if num_chunks == 2 else STYLES[:1]:
        placement = Placement(len(rows), num_chunks, style)
        if all(placement.stage_of(s) == k for k, of_row in enumerate(virtual_stages) for s in of_row):
            return [[Action(kind, m, placement.chunk_of(s)) for s, kind, m in order] for order in orders], style
    runs = "; ".join(f"row {k}: {', '.join(map(str, of_row))}" for k, of_row in enumerate(virtual_stages))
    raise ValueError(
        f"the CSV's rows run virtual stages that fit no placement of {len(rows)} rows ({runs}); "
        f'use "loop", row k with k, K+k, 2K+k ..., or "v", row k with k and 2K-1-k'
    )


def _parts(cell: str, row: int, column: int) -> list[tuple[int, str, int]]:
    """The actions of a cell: virtual stage, kind and micro-batch."""
    together = re.fullmatch(r"\((.*)\)OVERLAP_F_B", cell.strip())
    parts = []
    for part in map(str.strip, together[1].split(";") if together else [cell]):
        if match := re.fullmatch(rf"(\d+)([{''.join(ACTION_KINDS)}])(\d+)", part):
            parts.append((int(match[1]), match[2], int(match[3])))
        elif re.search(r"SEND|RECV|SHARD", part):
            remedy = "jpipe sends and gathers by itself; write the CSV without, as PyTorch's compute_only"
            raise ValueError(f"row {row}, cell {column} ({cell!r}) is communication: {remedy}")
        elif part and not re.fullmatch(r"\d+REDUCE_GRAD", part):  # which jpipe does at the end of a step
            raise ValueError(
                f"row {row}, cell {column} ({cell!r}) is no action; use a virtual stage, one of F, R, B, I and W, and "
                'a micro-batch, as "5F0", or nothing'
            )
    return parts
