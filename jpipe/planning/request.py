"""The request: what a user asked of a pipeline, checked. With a batch's shapes everything else follows from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jax.sharding import Mesh

from jpipe.layers.base import AnyLayer
from jpipe.mesh.splits import Splits, check_when
from jpipe.model.groups import DEFAULT_RULES
from jpipe.model.loss import LossFn
from jpipe.model.remat import Remat
from jpipe.planning.balance import Balance
from jpipe.schedules.schedule import Schedule
from jpipe.types import Batch, PyTree


@dataclass(frozen=True)
class Options:
    """How steps are carried out.

    Attributes:
      cast: what layers cast parameters to may be kept from the first use to the end of the "step", or is made at each
        "use".
      unroll: each place of a layer on a virtual stage is compiled for itself, and has arrays of its own: variables then
        lie otherwise, and go to a pipeline without by `layer_variables` and `from_layer_variables`.

    Raises:
      ValueError: an unknown word.
      TypeError: `unroll` is no bool.
    """

    cast: str = "step"
    unroll: bool = False

    def __post_init__(self) -> None:
        check_when("cast", self.cast)
        if not isinstance(self.unroll, bool):
            raise TypeError(
                f"unroll={self.unroll!r} is not a bool; True compiles a stage's layers one by one, False as a loop"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """The arguments of `jpipe.Pipeline`, checked and adapted.

    Attributes:
      layers: behind the one interface.
      loss_fn: of a micro-batch.
      read_inputs: batch -> what the first layer takes.
      remat: what a forward stores for its backward.
      merge: rules by collection that the user set, for those other than parameters.
      balance: by what, or where, layers are cut into stages.
      schedule: who does what in which order, in training.
      mesh: the devices, K of them along `stage`.
      splits: over which mesh axes besides `stage` weights and examples are split.
      options: how steps are carried out.
    """

    layers: tuple[AnyLayer, ...]
    loss_fn: LossFn
    read_inputs: Callable[[Batch], PyTree]
    remat: Remat
    merge: Mapping[str, str]
    balance: Balance
    schedule: Schedule
    mesh: Mesh
    splits: Splits
    options: Options

    @property
    def rules(self) -> dict[str, str]:
        """What becomes of collections other than parameters, by name."""
        return {**DEFAULT_RULES, **self.merge}
