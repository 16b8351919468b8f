"""The zero-bubble schedules of papers, action for action: zb-h1, zb-h2, zb-v, v-half, v-min and dualpipe-v.

The papers made them for stages that are programs of their own, each of which goes on as soon as it can, and for F, I
and W that take the same time. In lockstep, as jpipe runs them, there is one slot, in which stages do different kinds,
and it takes as long as the longest of them. There a rule for any schedule does better: `jpipe.zero_bubble` fills the
bubble with weight gradients, by backwards in two parts (docs/schedules.md compares them).

    pipe = jpipe.Pipeline(layers, loss_fn, schedule=zb_v(4, 8), num_stages=4, num_microbatches=8, num_chunks=2)

Here the letters F, I, W and B stand for actions of chunk 0, and f, i, w and b for those of chunk 1. "*" is the W that
has waited longest since its I. "+" is the W of chunk 1 that has waited longest, or of chunk 0 if none of chunk 1 waits.

    python examples/published_orders.py 4 8 FOLDER      # a CSV file of each for K=4 stages and M=8 micro-batches

Needs no devices. The files in examples/data/orders/ are those of K=4, M=8, for `jpipe.Schedule.from_csv`.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from jpipe import Action, Schedule


def zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B in whose bubble W runs (arXiv 2401.10241): K micro-batches in flight on every stage.

    >>> print(zb_h1(2, 3))
    zb-h1: K=2 stages, M=3 micro-batches, V=1 chunks; slots of a tick: FBW
    tick    |0  |1  |2  |3  |4  |5  |6  |7  |8  |9  |
    stage 0 |F0 |F1 |.  |I0 |W0 |F2 |I1 |W1 |I2 |W2 |
    stage 1 |.  |F0 |I0 |F1 |I1 |W0 |F2 |I2 |W1 |W2 |
    """
    return Schedule(_ahead(1, num_stages, num_microbatches), slots=("FBW",), name="zb-h1")


def zb_h2(num_stages: int, num_microbatches: int) -> Schedule:
    """Forwards twice as far ahead, 2K-1 in flight (arXiv 2401.10241): no bubble, if steps need not end together.

    >>> print(zb_h2(2, 3))
    zb-h2: K=2 stages, M=3 micro-batches, V=1 chunks; slots of a tick: FBW
    tick    |0  |1  |2  |3  |4  |5  |6  |7  |8  |9  |
    stage 0 |F0 |F1 |F2 |I0 |W0 |I1 |W1 |I2 |W2 |.  |
    stage 1 |.  |F0 |I0 |F1 |I1 |F2 |I2 |W0 |W1 |W2 |
    """
    return Schedule(_ahead(2, num_stages, num_microbatches), slots=("FBW",), name="zb-h2")


def zb_v(num_stages: int, num_microbatches: int) -> Schedule:
    """There and back, K micro-batches in flight on every stage (arXiv 2405.15362), as PyTorch orders it.

    >>> print(zb_v(2, 2))
    zb-v: K=2 stages, M=2 micro-batches, V=2 chunks; slots of a tick: FBW
    tick    |0    |1    |2    |3    |4    |5    |6    |7    |8    |9    |10   |11   |12   |13   |
    stage 0 |F0   |F1   |.    |F0.1 |I0.1 |W0.1 |F1.1 |I1.1 |W1.1 |I0   |W0   |.    |I1   |W1   |
    stage 1 |.    |F0   |F0.1 |F1   |F1.1 |I0.1 |W0.1 |I0   |W0   |I1.1 |W1.1 |I1   |W1   |.    |
    """
    K, N = num_stages, max(num_microbatches, 2 * num_stages - 1)
    orders = [
        "F" * (2 * (K - k) - 1) + "fF" * k + "fiw" * (K - k)
        + "FIWfiw" * (N - K)
        + "Ii" * k + "IW" * (K - k) + "w" * K
        for k in range(K)
    ]  # fmt: skip
    return _in_a_v("zb-v", orders, num_microbatches)


def dualpipe_v(num_stages: int, num_microbatches: int) -> Schedule:
    """Forwards next to backwards, for systems that run one beside the other (DeepSeek's DualPipe, "cut in half").

    Here they run one after the other. With fewer micro-batches than 2K those that lack are left out.

    >>> print(dualpipe_v(2, 4).grid(110))
    dualpipe-v: K=2 stages, M=4 micro-batches, V=2 chunks; slots of a tick: FBW
    tick    |0    |1    |2    |3    |4    |5    |6    |7    | ... |12   |13   |14   |15   |16   |17   |18   |
    stage 0 |F0   |F1   |F2   |F0.1 |I0.1 |W0.1 |F1.1 |F3   | ... |F3.1 |B1   |B3.1 |I2   |W2   |I3   |W3   |
    stage 1 |.    |F0   |F0.1 |F1   |F1.1 |F2   |B0.1 |F2.1 | ... |B1   |B2.1 |B2   |I3.1 |I3   |W3.1 |W3   |
    4 of 19 ticks are left out; schedule.grid() has all
    """
    K, N = num_stages, max(num_microbatches, 2 * num_stages)
    orders = [
        "F" * (2 * (K - k - 1)) + "Ff" * (k + 1) + "iwf" * (K - k - 1)
        + "FbfB" * (N - 2 * K + k + 1)
        + "bfB" * (K - k - 1)
        + "bB" * (k // 2) + ("bB" if k % 2 else "bI") + "iI" * (k - k // 2) + "*I" * (K - k - 1)
        for k in range(K)
    ]  # fmt: skip
    return _in_a_v("dualpipe-v", orders, num_microbatches)


def v_half(num_stages: int, num_microbatches: int) -> Schedule:
    """There and back with half of 1F1B's memory, K/2+1 micro-batches (arXiv 2405.15362, not reordered).

    >>> print(v_half(2, 2))
    v-half: K=2 stages, M=2 micro-batches, V=2 chunks; slots of a tick: FBW
    tick    |0    |1    |2    |3    |4    |5    |6    |7    |8    |9    |10   |11   |12   |13   |14   |15   |16   |
    stage 0 |F0   |.    |.    |F0.1 |F1   |I0.1 |W0.1 |F1.1 |.    |.    |I0   |I1.1 |W1.1 |W0   |.    |I1   |W1   |
    stage 1 |.    |F0   |F0.1 |.    |.    |F1   |F1.1 |I0.1 |W0.1 |I0   |W0   |.    |I1.1 |W1.1 |I1   |W1   |.    |
    """
    K, late = num_stages, 0 if num_stages % 2 else 3
    starts = [(2 * k, 3 * K - k - 2, 3 * K + late + 2 * k - 1, 6 * K + late - k - 2) for k in range(K)]
    return _in_a_v("v-half", _repeated(starts, num_microbatches), num_microbatches)


def v_min(num_stages: int, num_microbatches: int) -> Schedule:
    """There and back with a third of 1F1B's memory (arXiv 2405.15362, not reordered).

    >>> print(v_min(2, 2))
    v-min: K=2 stages, M=2 micro-batches, V=2 chunks; slots of a tick: FBW
    tick    |0    |1    |2    |3    |4    |5    |6    |7    |8    |9    |10   |11   |12   |13   |14   |
    stage 0 |F0   |.    |.    |F0.1 |I0.1 |W0.1 |F1   |I0   |W0   |F1.1 |I1.1 |W1.1 |.    |I1   |W1   |
    stage 1 |.    |F0   |F0.1 |.    |.    |I0.1 |I0   |F1   |F1.1 |W0.1 |W0   |I1.1 |I1   |W1.1 |W1   |
    """
    K, late = num_stages, 0 if num_stages % 3 else 2
    starts = [(k, 2 * K - k - 1, 2 * K + late + k, 4 * K + late - k - 1) for k in range(K)]
    return _in_a_v("v-min", _repeated(starts, num_microbatches), num_microbatches)


def _ahead(hops: int, num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """Makes orders in which forwards run ahead of I, and I ahead of W.

    Forwards are ahead by `hops` for each stage that comes after, and I by as many for each stage that comes before.
    """
    return [
        _actions("F" * hops * (num_stages - 1 - k) + "FI" * hops * k + "FI*" * num_microbatches, num_microbatches)
        for k in range(num_stages)
    ]


def _repeated(starts: list[tuple[int, int, int, int]], num_microbatches: int) -> list[str]:
    """Each stage's letters in units of time. A micro-batch starts every six, and W are where nothing else is.

    Args:
      starts: by stage the times at which F, f, i and I of the first micro-batch run.
      num_microbatches: M.
    """
    orders = []
    for units in starts:
        at = {unit + 6 * m: letter for unit, letter in zip(units, "FfiI", strict=True) for m in range(num_microbatches)}
        orders.append("".join(at.get(unit, "+") for unit in range(max(at) + 2 * num_microbatches)))
    return orders


def _in_a_v(name: str, orders: Iterable[str], num_microbatches: int) -> Schedule:
    """Makes a schedule in the style "v" of each stage's letters."""
    actions = [_actions(order, num_microbatches) for order in orders]
    return Schedule(actions, slots=("FBW",), style="v", name=name)


def _actions(letters: str, num_microbatches: int) -> list[Action]:
    """The letters as actions, each kind and chunk counted from 0; actions of more than M micro-batches are left out.

    A letter W adds nothing if no I waits for its W. The W that are still due at the end are appended.
    """
    order: list[Action] = []
    counts, waiting = Counter(), []
    for letter in letters:
        kind, chunk = letter.upper(), int(letter.islower())
        if kind in "W*+":
            chunk = max((action.chunk for action in waiting), default=0) if letter == "+" else chunk
            due = [action for action in waiting if letter == "*" or action.chunk == chunk][:1]
            waiting = [action for action in waiting if action not in due]
            order += due
            continue
        flow = "F" if kind == "F" else "B"
        if (number := counts[flow, chunk]) < num_microbatches:
            order.append(Action(kind, number, chunk))
            waiting += [Action("W", number, chunk)] * (kind == "I")
        counts[flow, chunk] += 1
    return [*order, *waiting]


PUBLISHED: dict[str, Callable[[int, int], Schedule]] = {
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": dualpipe_v,
}


def write(num_stages: int, num_microbatches: int, folder: Path) -> None:
    """Writes a CSV file of each, in PyTorch's format: a row for each stage."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in PUBLISHED.items():
        (folder / f"{name}.csv").write_text(make(num_stages, num_microbatches).to_csv())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("num_stages", type=int)
    parser.add_argument("num_microbatches", type=int)
    parser.add_argument("folder", type=Path)
    write(**vars(parser.parse_args()))
