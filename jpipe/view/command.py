"""The command line `jpipe`: its arguments, and what it prints."""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from jpipe import __version__
from jpipe.view.page import PAGE, checked, open_browser
from jpipe.view.server import address_of, make_server

PORT = 8427  # the same everywhere, so that a colleague's address works here


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
    from jpipe.forecasting.plan_command import DESCRIPTION, add_arguments, search_and_print

    parser = argparse.ArgumentParser(prog="jpipe", description="Pipeline parallelism for Flax models.")
    parser.add_argument("--version", action="version", version=f"jpipe {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    view = commands.add_parser(
        "view",
        help="open a page that shows where a pipeline's time and memory go",
        description="Opens a page with sliders for stages, micro-batches, schedule and memory. It is served to this "
        "machine alone and needs no network.",
    )
    view.add_argument("--port", type=int, default=PORT, help=f"where to serve it (default {PORT}; 0: any that is free)")
    view.add_argument("--no-browser", dest="browser", action="store_false", help="print the address, open nothing")
    view.add_argument("--save", type=Path, metavar="FILE", help="write the page to FILE, for a site, and serve nothing")
    view.set_defaults(run=_view)
    plan = commands.add_parser("plan", help="search the settings that train a model fastest", description=DESCRIPTION)
    add_arguments(plan)
    plan.set_defaults(run=search_and_print)
    return parser


def _view(options: argparse.Namespace) -> None:
    if options.save is not None:
        _save(options.save)
    else:
        _serve(options.port, browser=options.browser)


def _save(path: Path) -> None:
    shutil.copyfile(PAGE, checked(path, "--save "))
    print(f"wrote {path}: one file, open it in any browser")


def _serve(port: int, *, browser: bool) -> None:
    with make_server(port) as server:
        address = address_of(server)
        print(f"jpipe view: {address} (Ctrl+C stops it)", flush=True)
        if browser and not open_browser(address):
            print(
                "No browser could be opened. Open the address in one on this machine; from another machine first run "
                f"`ssh -L {server.server_address[1]}:127.0.0.1:{server.server_address[1]} HOST` there, or take the "
                "page along: `jpipe view --save FILE`.",
                flush=True,
            )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
