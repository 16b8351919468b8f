"""`Shared`: one set of parameters in several places of the sequence, on whatever stages these lie.

The parameters lie on one stage, that of the first use, so that optimisers and norms see them once. At the start of a
step they are sent to all stages. Each use adds its gradients to the accumulator of its own stage, and these are added
up at the end. There are no copies that could drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jpipe.types import PyTree

Method = str | Callable[..., PyTree]
"""How a layer is called instead of as usual: by the name of one of its methods, or through a function of the user's."""


@dataclass(frozen=True, eq=False)
class Shared:
    """A layer whose parameters are used in several places.

    `table = jpipe.Shared(nn.Embed(1000, 64)); layers = [table, *blocks, table.using("attend")]`

    Args:
      layer: a linen or nnx module, a factory of one, or a `jpipe.Layer`; without state that changes. The
        first use in the sequence makes the parameters.
    """

    layer: object

    def __post_init__(self):
        if isinstance(self.layer, Shared | Use):
            raise TypeError("jpipe.Shared: the layer is shared already; use it in several places as it is")

    def using(self, method: Method) -> Use:
        """Uses the same parameters in another place, through another method.

        Args:
          method: the name of a method of the module; of linen modules also a function of the module and its inputs;
            for a `jpipe.Layer` a function `apply(params, x)`.
        """
        if not isinstance(method, str) and not callable(method):
            raise TypeError(f"jpipe.Shared.using({method!r}): pass a method's name, or a function")
        return Use(self, method)


def how_to_share(kind: str, method: str = "") -> str:
    """Says in words how a module of the class `kind` has one set of parameters in two places."""
    method = method or ("attend" if kind == "Embed" else "a_method")
    return (
        f"to have the same parameters in both places, wrap it once, tied = jpipe.Shared({kind}(...)), and put tied in "
        f'both, or tied.using("{method}") where that method is to be called'
    )


@dataclass(frozen=True, eq=False)
class Use:
    """A shared layer where it is called through `method`, or as usual if that is None."""

    shared: Shared
    method: Method | None
