"""The command line `jpipe`, or `python -m jpipe`: its arguments, and what it prints."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jpipe import __version__
from jpipe.tools.page import open_page, write_page


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status, 2 for wrong arguments.

    Args:
      arguments: the arguments; default: `sys.argv[1:]`.
    """
    parser = argparse.ArgumentParser(prog="jpipe", description="Pipeline parallelism for Flax models.")
    parser.add_argument("--version", action="version", version=f"jpipe {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    opens = "open a page that shows where a pipeline's time and memory go, with sliders for its settings"
    view = commands.add_parser("view", help=opens, description=opens)
    view.add_argument("--save", type=Path, metavar="FILE", help="write the page to FILE, for a site, and open nothing")
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        page = write_page(options.save)
    except (ValueError, OSError) as error:
        parser.exit(2, f"jpipe view: {error}\n")
    if options.save is None:
        open_page(page, "jpipe view --save FILE")
    else:
        print(f"wrote {options.save}: one file, open it in any browser")
    return 0


if __name__ == "__main__":
    sys.exit(main())
