"""Pages of memory that a step takes from the kernel, and its processor seconds, by how processes are given memory.

All processes of a variant run on one core: that hardly changes with what else runs.
"""

import argparse
import statistics

from compare import Conditions, entries, parse
from turns import MEMORY

USUAL = ("torch,single,accumulated", "torch,1f1b", "hand,unrolled,accumulated", "none,1f1b", "layer,1f1b")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=USUAL, help="variants that have one of these words in their names")
    parser.add_argument("--steps", type=int, default=4, help="after two that don't count (default %(default)s)")
    options, sizes, interpreters = parse(parser)
    columns = (f"M={sizes.microbatches}, all on one core", "memory", "pages taken a step", "processor seconds")
    columns += ("in the kernel",)
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for entry in entries(list(interpreters), options.only, core=True):
        for memory in MEMORY:
            variant = Conditions(sizes, interpreters, options.steps, limit=0, memory=memory).start(entry)
            try:
                steps = [variant.step() for _ in range(2 + options.steps)][2:]
            finally:
                variant.close()
            faults, busy, system = (
                statistics.median(getattr(step, name) for step in steps) for name in ("faults", "processor", "system")
            )
            figures = f"{faults:,.0f} | {busy:.2f} | {system:.2f}"
            print(f"| {entry.peer} `{entry.variant}` | {memory} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
