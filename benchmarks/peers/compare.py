"""jpipe and its peers at the same model, in turns: a step's seconds, each beside its own best step of one device.

Every variant has processes of its own, each on one core with one thread, or one process of two devices on both. One
step of a variant is taken while all others sleep, then one of the next. All start from the same weights and must give
the same losses. A peer takes part if its interpreter is named.
"""

import argparse
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from results import ALONE, Row, report, write
from same_model import Sizes
from turns import HERE, MEMORY, Step, Variant

COUNTED = 4  # losses that are compared: before three steps, and after
A_TURN = 2  # timed steps, one after the other
TOLERANCE = 2e-5  # of them, relative: float32 sums in another order

MORE = {
    "torch": ["single,accumulated,compiled", "1f1b,compiled", "single,written", "1f1b,written"],
    "jpipe": ["hand,unrolled", "one,none,zero_bubble", "one,layer,1f1b"],
}
"""Variants that take part only if `--only` names them."""
SPECTRAX = ("GPipe", "Std1F1B", "Eager1F1B", "ZeroBubbleH1", "DualPipeV")  # one chunk a device, or two in a V
SPECTRAX += ("InterleavedGPipe", "Interleaved1F1BPlusOne", "InterleavedH1", "KimiK2")  # two in a loop
SINGLE = {
    "torch": ["single", "single,accumulated"],
    "jpipe": ["hand,scanned,accumulated", "hand,unrolled,accumulated", "single,none,1f1b"],
    **{peer: ["single", "single,accumulated"] for peer in ("spectrax", "maxtext", "praxis")},
}
PIPELINED = {
    "torch": ["gpipe", "1f1b"],
    "jpipe": [
        *(f"two,none,{schedule}" for schedule in ("1f1b", "gpipe", "zero_bubble")),
        *("two,none,interleaved,2", "two,layer,1f1b", "one,none,1f1b"),
    ],
    "spectrax": [f"simulated,{name}" for name in SPECTRAX],
    "maxtext": ["simulated,iteration_input", "simulated,everything"],
    "praxis": ["simulated,save_iteration_input", "simulated,save_everything"],
}
PEERS = ("torch", "jpipe", "spectrax", "maxtext", "praxis")


class Entry(NamedTuple):
    """A variant to be run: by whom, what, and where (`cores`: one process's an item)."""

    peer: str
    variant: str
    cores: list[set[int]]

    @property
    def where(self) -> str:
        """How many processes, and on how many cores."""
        return f"{len(self.cores)} on {len(set.union(*self.cores))}"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def entries(peers: list[str], only: list[str], core: bool) -> Iterator[Entry]:
    """Variants of these peers, or of all theirs those that have one of the words in their names.

    Args:
      peers: their names.
      only: words; none for the usual variants.
      core: all processes on one core.
    """
    first, second = sorted(os.sched_getaffinity(0))[:2]
    for peer in peers:
        more = MORE.get(peer, []) if only else []
        for variant in [*SINGLE[peer], *PIPELINED[peer], *more]:
            if only and not any(word in f"{peer},{variant}" for word in only):
                continue
            if variant.startswith(ALONE):
                yield Entry(peer, variant, [{first}])
            elif variant.startswith(("one,", "simulated")):  # one process of two devices
                yield Entry(peer, variant, [{first} if core else {first, second}])
            else:
                yield Entry(peer, variant, [{first}, {first} if core else {second}])


class Conditions(NamedTuple):
    """Under which all variants run; `interpreters` by peer, `limit` seconds of turns after which none begins."""

    sizes: Sizes
    interpreters: dict[str, str]
    turns: int
    limit: float
    memory: str = "kept"

    def start(self, entry: Entry) -> Variant:
        """The variant's processes."""
        command = [self.interpreters[entry.peer], str(HERE / f"{entry.peer}_peer.py"), entry.variant]
        command += [f"--port={free_port()}", *self.sizes.arguments()]
        return Variant(command, entry.cores, memory=self.memory)


def take_turns(found: list[Entry], conditions: Conditions) -> list[list[Step]]:
    """All steps of all variants; the first `COUNTED` of each come before any that is timed."""
    running, steps = {}, {}
    try:
        for i, entry in enumerate(found):
            running[i] = conditions.start(entry)
            steps[i] = [running[i].step() for _ in range(COUNTED)]
            print(f"{entry.peer} {entry.variant}: first step {steps[i][0].seconds:.1f} s", file=sys.stderr)
        begin = time.monotonic()
        for _ in range(conditions.turns):
            if time.monotonic() - begin > conditions.limit:
                break
            for i, variant in running.items():
                variant.step()  # after a while asleep: caches, and memory that went back to the machine, are not timed
                steps[i] += [variant.step() for _ in range(A_TURN)]
    finally:
        for variant in running.values():
            variant.close()
    return [steps[i] for i in range(len(found))]


def check_losses(found: list[Entry], steps: list[list[Step]]) -> None:
    """All variants' losses before each of the first steps.

    Raises:
      SystemExit: they differ.
    """
    losses = np.array([[step.loss for step in taken[:COUNTED]] for taken in steps])
    apart = np.abs(losses / losses[0] - 1).max(axis=1)
    if not (apart < TOLERANCE).all():
        worst = found[int(apart.argmax())]
        raise SystemExit(f"{worst.peer} {worst.variant} trains another model: {losses[apart.argmax()]}, {losses[0]}")
    print(f"losses before each of {COUNTED} steps: {losses[0]}; largest difference, relative: {apart.max():.1e}")


def row_of(run: str, entry: Entry, steps: list[Step], sizes: Sizes, memory: str) -> Row:
    """Of the steps that had the machine to themselves, if these are at least three; else of all that were timed."""
    timed = steps[COUNTED:]
    undisturbed = [step for step in timed if step.quiet]
    quiet = len(undisturbed) >= 3
    timed = undisturbed if quiet else timed
    seconds = [step.seconds for step in timed]
    return Row(
        *(run, entry.peer, entry.variant, sizes.width, sizes.microbatches, entry.where, len(timed)),
        *(round(x, 4) for x in (steps[0].seconds, min(seconds), statistics.median(seconds))),
        round(statistics.median(step.processor for step in timed), 4),
        round(steps[-1].peak, 1),
        round(steps[COUNTED - 1].loss, 6),
        memory,
        quiet,
    )


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Sizes, dict[str, str]]:
    """Reads the command line, with options for sizes and peers: all options, the sizes, and interpreters by peer."""
    for peer in PEERS:
        default = sys.executable if peer == "jpipe" else None
        parser.add_argument(f"--{peer}", default=default, metavar="PYTHON", help=f"interpreter that has {peer}")
    Sizes.add_arguments(parser)
    options = parser.parse_args()
    named = {peer: getattr(options, peer) for peer in PEERS}
    return options, Sizes.of(options), {peer: path for peer, path in named.items() if path}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=6, help="of each, each of two timed steps (default %(default)s)")
    parser.add_argument("--limit", type=float, default=400, help="seconds, then no turn begins (default %(default)s)")
    parser.add_argument("--only", nargs="+", default=[], help="variants that have one of these words in their names")
    parser.add_argument("--one-core", action="store_true", help="all processes of a variant on one core: its work")
    parser.add_argument("--memory", choices=MEMORY, default="kept", help="`MEMORY` in turns.py (default %(default)s)")
    parser.add_argument("--run", help="the run's name in tables (default: M=...)")
    parser.add_argument("--write", type=Path, help="a CSV file to add the rows to")
    options, sizes, interpreters = parse(parser)
    found = list(entries(list(interpreters), options.only, options.one_core))
    steps = take_turns(found, Conditions(sizes, interpreters, options.turns, options.limit, options.memory))
    check_losses(found, steps)
    run = options.run or f"M={sizes.microbatches}"
    rows = [row_of(run, *pair, sizes, options.memory) for pair in zip(found, steps, strict=True)]
    if options.write:
        write(rows, options.write)
    print("\n".join(report(rows)))


if __name__ == "__main__":
    main()
