"""The command line `jpipe`: its arguments, and what it prints."""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from jpipe import __version__
from jpipe.forecasting.plan_command import DESCRIPTION, add_arguments, search_and_print
from jpipe.view.page import PAGE, Page, checked, open_page


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status, 2 for wrong arguments.

    Args:
      arguments: in place of `sys.argv[1:]`.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        options.run(options)
    except (ValueError, TypeError, ImportError, OSError) as error:
        parser.exit(2, f"jpipe {options.command}: {error}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jpipe", description="Pipeline parallelism for Flax models.")
    parser.add_argument("--version", action="version", version=f"jpipe {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    view = commands.add_parser(
        "view",
        help="open a page that shows where a pipeline's time and memory go",
        description="Opens a page with sliders for stages, micro-batches, schedule and memory: one file, which needs "
        "no network.",
    )
    view.add_argument("--save", type=Path, metavar="FILE", help="write the page to FILE, for a site, and open nothing")
    view.set_defaults(run=_view)
    plan = commands.add_parser("plan", help="search the settings that train a model fastest", description=DESCRIPTION)
    add_arguments(plan)
    plan.set_defaults(run=search_and_print)
    return parser


def _view(options: argparse.Namespace) -> None:
    """Opens the page, or copies it to a file."""
    if options.save is None:
        open_page(Page(PAGE), "jpipe view --save FILE")
    else:
        shutil.copyfile(PAGE, checked(options.save, "--save "))
        print(f"wrote {options.save}: one file, open it in any browser")
