"""Choices that change what a step takes, and never what it computes."""

from __future__ import annotations

from dataclasses import dataclass

_WHEN = ("step", "use")


@dataclass(frozen=True)
class Options:
    """How steps are carried out.

    Attributes:
      gather: parameters that are split over data axes are gathered once a "step", or at each "use".
      cast: what layers cast parameters to may be kept from the first use to the end of the "step", or is made at each
        "use".
      unroll: each place of a layer on a virtual stage is compiled for itself, and has arrays of its own: variables then
        lie otherwise, and go to a pipeline without by `layer_variables` and `from_layer_variables`.

    Raises:
      ValueError: an unknown word.
      TypeError: `unroll` is no bool.
    """

    gather: str = "step"
    cast: str = "step"
    unroll: bool = False

    def __post_init__(self) -> None:
        for name in ("gather", "cast"):
            value = getattr(self, name)
            if value not in _WHEN:
                raise ValueError(f"{name}={value!r} is unknown; use one of {list(_WHEN)}")
        if not isinstance(self.unroll, bool):
            raise TypeError(
                f"unroll={self.unroll!r} is not a bool; True compiles a stage's layers one by one, False as a loop"
            )
