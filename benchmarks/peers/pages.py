"""Pages of memory that a step takes from the kernel, and its processor seconds, with usual pages and large ones.

XLA's CPU client gives a program's temporaries back after each call, so that the next call is given them anew, page by
page, each filled with zeros. All processes of a variant run on one core: that hardly changes with what else runs.
"""

import argparse
import statistics
import sys

from compare import PEERS, Conditions, entries
from same_model import Sizes

USUAL = ("torch,single,accumulated", "torch,1f1b", "hand,unrolled,accumulated", "none,unrolled,1f1b", "layer,unrolled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for peer in PEERS:
        default = sys.executable if peer == "jpipe" else None
        parser.add_argument(f"--{peer}", default=default, metavar="PYTHON", help=f"interpreter that has {peer}")
    parser.add_argument("--only", nargs="+", default=USUAL, help="variants that have one of these words in their names")
    parser.add_argument("--steps", type=int, default=4, help="after two that don't count (default %(default)s)")
    Sizes.add_arguments(parser)
    options = parser.parse_args()
    sizes = Sizes.of(options)
    interpreters = {peer: getattr(options, peer) for peer in PEERS if getattr(options, peer)}
    print(f"| M={sizes.microbatches}, all on one core | pages | taken a step | processor seconds | in the kernel |")
    print("|---|---|---|---|---|")
    for entry in entries(list(interpreters), options.only, core=True):
        for large in (False, True):
            variant = Conditions(sizes, interpreters, options.steps, limit=0, large_pages=large).start(entry)
            try:
                steps = [variant.step() for _ in range(2 + options.steps)][2:]
            finally:
                variant.close()
            faults, busy, system = (
                statistics.median(getattr(step, name) for step in steps) for name in ("faults", "processor", "system")
            )
            kind = "2 MiB" if large else "4 KiB"
            print(
                f"| {entry.peer} `{entry.variant}` | {kind} | {faults:,.0f} | {busy:.2f} | {system:.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
