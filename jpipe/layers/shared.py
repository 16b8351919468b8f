"""Shared weights: one set of parameters in several places of the sequence, on whatever stages they lie.

The parameters have one home, the stage of the first use, so that optimisers and norms see them once. At the start of
a step they are sent to all stages; each use adds to its stage's own accumulator, and the sums are added up at the end.
There are no copies that could drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jpipe.layers.base import AnyLayer, Wrapper


@dataclass(frozen=True, eq=False)
class Shared:
    """A layer whose parameters are used in several places.

    `table = jpipe.Shared(nn.Embed(1000, 64)); layers = [table, *blocks, table.using("attend")]`

    Args:
      layer: a linen or nnx module, a factory of one, or a `jpipe.Layer`; without state besides its parameters. The
        first use in the sequence makes the parameters.
    """

    layer: Any

    def __post_init__(self):
        if isinstance(self.layer, Shared | Use):
            raise TypeError("jpipe.Shared: the layer is shared already; use it in several places as it is")

    def using(self, method: str | Callable[..., Any]) -> Use:
        """The same parameters in another place, through another method.

        Args:
          method: the name of a method of the module; of linen modules also a function of the module and its inputs;
            for a `jpipe.Layer` a function `apply(params, x)`.
        """
        if not isinstance(method, str) and not callable(method):
            raise TypeError(f"jpipe.Shared.using({method!r}): pass a method's name, or a function")
        return Use(self, method)


@dataclass(frozen=True, eq=False)
class Use:
    """One place where a shared layer is used through `method`."""

    shared: Shared
    method: str | Callable[..., Any] | None


@dataclass(frozen=True)
class SharedLayer(Wrapper):
    """A use of a shared layer, adapted: the layer with the method of this use.

    Attributes:
      owner: whose parameters it uses.
    """

    owner: Shared

    @property
    def shared(self) -> Shared:
        """Whose parameters it uses."""
        return self.owner

    def is_same(self, other: AnyLayer) -> bool:
        """The same method of the same shared layer."""
        return isinstance(other, SharedLayer) and self.owner is other.owner and self.inner.is_same(other.inner)
