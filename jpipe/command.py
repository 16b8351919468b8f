"""The command line `jpipe`: its arguments, and what it prints."""

import argparse
import inspect
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from jpipe import __version__
from jpipe.tools.chips import GIB
from jpipe.tools.page import open_page, write_page
from jpipe.tools.search import plan

RETURNS = "layers, loss_fn, batch, tx[, options of jpipe.Pipeline as a dict]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status, 2 for wrong arguments.

    Args:
      arguments: the arguments; default: `sys.argv[1:]`.
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
    opens = "open a page that shows where a pipeline's time and memory go, with sliders for its settings"
    view = commands.add_parser("view", help=opens, description=opens)
    view.add_argument("--save", type=Path, metavar="FILE", help="write the page to FILE, for a site, and open nothing")
    view.set_defaults(run=_view)
    finds = "search the settings that train a model fastest, of those that fit"
    search = commands.add_parser("plan", help=finds, description=finds)
    add = search.add_argument
    add("model", metavar="FILE.py:FACTORY", help=f"a function that takes the batch size and returns ({RETURNS})")
    add("--batch", type=int, required=True, help="examples of a step")
    add("--topology", help='a slice of TPUs or GPUs, as "v5e:4x4" (default: the devices at hand)')
    add("--memory", type=float, metavar="GIB", help="of a device (default: nine tenths of what it has)")
    add("--stages", type=int, metavar="K", help="keep the number of stages")
    add("--microbatches", type=int, metavar="M", help="keep the number of micro-batches")
    search.set_defaults(run=_plan)
    return parser


def _view(options: argparse.Namespace) -> None:
    """Writes the page, and opens it unless it is to be saved."""
    page = write_page(options.save)
    if options.save is None:
        open_page(page, "jpipe view --save FILE")
    else:
        print(f"wrote {options.save}: one file, open it in any browser")


def _plan(options: argparse.Namespace) -> None:
    """Prints the best settings for the model of the user's factory."""
    if options.batch < 1:
        raise ValueError(f"--batch {options.batch} is less than 1; pass the examples of a step")
    layers, loss_fn, batch, tx, *rest = _made(options.model, options.batch)
    kept = {"num_stages": options.stages, "num_microbatches": options.microbatches}
    pinned = {**(rest[0] if rest else {}), **{name: value for name, value in kept.items() if value is not None}}
    pinned["memory"] = None if options.memory is None else options.memory * GIB
    print(plan(layers, loss_fn, batch, tx, topology=options.topology, **pinned))


def _made(model: str, batch_size: int) -> tuple:
    """Calls a user's function, and returns its tuple.

    Args:
      model: "FILE.py:FACTORY".
      batch_size: B, the function's argument. If the function takes none, its batch is cut or lengthened to B.

    Raises:
      FileNotFoundError, ValueError: there is no such file or function, or the function returns something else.
    """
    file, colon, factory = model.rpartition(":")
    if not colon:
        raise ValueError(f"{model!r} names no function; pass FILE.py:FACTORY")
    if not Path(file).is_file():
        raise FileNotFoundError(f"there is no file {file}")
    sys.path.insert(0, str(Path(file).resolve().parent))  # as Python does, for what the file imports
    names = runpy.run_path(file)
    function = names.get(factory)
    if not callable(function):
        functions = ", ".join(name for name, value in names.items() if inspect.isfunction(value)) or "none"
        raise ValueError(f"{file} has no function {factory!r}; its functions are {functions}")
    takes_size = bool(inspect.signature(function).parameters)
    made = function(batch_size) if takes_size else function()
    if not isinstance(made, tuple) or len(made) not in (4, 5):
        raise ValueError(f"{model} returned {type(made).__name__}; it has to return the tuple ({RETURNS})")
    layers, loss_fn, batch, *rest = made
    if not takes_size:
        batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct((batch_size, *a.shape[1:]), a.dtype), batch)
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
    if sizes != {batch_size}:
        raise ValueError(f"{model} returned a batch of {sorted(sizes)} examples for --batch {batch_size}")
    return layers, loss_fn, batch, *rest
