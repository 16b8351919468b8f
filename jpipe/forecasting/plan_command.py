"""The command `jpipe plan FILE.py:FACTORY`: calls the user's factory, and prints the settings found."""

from __future__ import annotations

import inspect
import runpy
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from jpipe.costs.chips import GIB
from jpipe.forecasting.search import plan

MADE = "layers, loss_fn, batch, tx[, options of jpipe.Pipeline as a dict]"
DESCRIPTION = f"""Searches the settings that train a model fastest, of those that fit. FACTORY is a function in FILE.py
that takes the batch size and returns ({MADE}); shapes do for a batch. Nothing is compiled without --compile."""


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", metavar="FILE.py:FACTORY", help="the function that makes the model")
    parser.add_argument("--batch", type=int, required=True, help="examples of a step")
    parser.add_argument("--topology", help='a slice of TPUs or GPUs, as "v5e:4x4" (default: the devices at hand)')
    parser.add_argument("--memory", type=float, metavar="GIB", help="of a device (default: nine tenths of what it has)")
    parser.add_argument("--stages", type=int, metavar="K", help="keep the number of stages")
    parser.add_argument("--microbatches", type=int, metavar="M", help="keep the number of micro-batches")
    parser.add_argument(
        "--compile", type=int, nargs="?", const=3, default=0, metavar="N", help="compile the first N (3) for comparison"
    )


def search_and_print(options: Namespace) -> None:
    """Prints the best settings.

    Raises:
      ValueError, OSError: arguments are wrong, or `plan` refuses.
    """
    if options.batch < 1:
        raise ValueError(f"--batch {options.batch} is less than 1; pass the examples of a step")
    layers, loss_fn, batch, tx, *rest = made(options.model, options.batch)
    kept = {"num_stages": options.stages, "num_microbatches": options.microbatches}
    more = {**(rest[0] if rest else {}), **{name: value for name, value in kept.items() if value is not None}}
    memory = None if options.memory is None else options.memory * GIB
    print(plan(layers, loss_fn, batch, tx, topology=options.topology, memory=memory, compiled=options.compile, **more))


def made(model: str, batch_size: int) -> Sequence:
    """Calls a user's function, and returns its result.

    Args:
      model: "FILE.py:FACTORY".
      batch_size: B, what it is called with; a function of nothing gets none, and its batch is cut or lengthened.

    Raises:
      FileNotFoundError, ValueError: there is no such file or function, or it returns something else.
    """
    name, found, factory = model.rpartition(":")
    if not found:
        raise ValueError(f"{model!r} names no function; pass FILE.py:FACTORY")
    if not Path(name).is_file():
        raise FileNotFoundError(f"there is no file {name}")
    sys.path.insert(0, str(Path(name).resolve().parent))  # as Python does, for what the file imports
    own = runpy.run_path(name)
    function = own.get(factory)
    if not callable(function):
        known = ", ".join(name for name, value in own.items() if inspect.isfunction(value)) or "none"
        raise ValueError(f"{name} has no function {factory!r}; its functions are {known}")
    result = _called(function, batch_size)
    if not isinstance(result, tuple) or len(result) not in (4, 5):
        raise ValueError(f"{model} returned {type(result).__name__}; it has to return the tuple ({MADE})")
    size = {leaf.shape[0] for leaf in jax.tree.leaves(result[2])}
    if size != {batch_size}:
        raise ValueError(f"{model} returned a batch of {sorted(size)} examples for --batch {batch_size}")
    return result


def _called(function: Callable, batch_size: int) -> object:
    if inspect.signature(function).parameters:
        return function(batch_size)
    result = function()
    if not isinstance(result, tuple) or len(result) not in (4, 5):
        return result
    longer = lambda a: jax.ShapeDtypeStruct((batch_size, *a.shape[1:]), a.dtype)
    return (*result[:2], jax.tree.map(longer, result[2]), *result[3:])
