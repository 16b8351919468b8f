"""Uses what isn't documented API of Flax, as `jpipe.seam.inside` does for JAX."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import flax
from flax import nnx

from jpipe.terminal.progress import warn_once

FOLDER = Path(flax.__file__).parent
"""Where Flax's own files are."""


def collection_of(variable_type: type[nnx.Variable]) -> str:
    """The name of the collection that variables of a type are in, as in Linen: `batch_stats` of `nnx.BatchStat`.

    Uses `nnx.variable_name_from_type`, which `nnx.bridge` uses; types that it doesn't know are called as their class.
    The reference has no page for it. Without it collections have other names, in checkpoints and in `merge` too.
    """
    try:
        return nnx.variable_name_from_type(variable_type)
    except ValueError:
        return variable_type.__name__


def unsharded_creation() -> AbstractContextManager[object]:
    """A context in which nnx doesn't put new variables onto a mesh: where they lie is the layout's to say.

    Uses `nnx.use_eager_sharding`, which only a proposal describes. Without it modules with sharding metadata can't be
    made where a mesh is set. The public flag `flax_always_shard_variable` is one for the whole program.
    """
    if not hasattr(nnx, "use_eager_sharding"):
        warn_once("this version of Flax has no nnx.use_eager_sharding; make modules where no mesh is set")
        return nullcontext()
    return nnx.use_eager_sharding(False)
