"""`Request`: all that a user asked of a pipeline, checked: its arguments and their defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from jax.sharding import Mesh

from jpipe.layers.base import AnyLayer
from jpipe.model.groups import DEFAULT_RULES
from jpipe.model.loss import OVER, LossFn
from jpipe.model.remat import Remat
from jpipe.partitioner.splits import Splits
from jpipe.planning.partition import Balance
from jpipe.schedules.schedule import Schedule
from jpipe.types import Batch, PyTree
from jpipe.users_numbers import as_number


@dataclass(frozen=True)
class Offload:
    """The shares of what lies on the hosts: 0 for nothing, 1 for all.

    A chip's host has several times the memory of its chips, behind a link that is a hundred times slower than the
    chip's own memory. So what waits long, or is needed once a step, may lie there, if it moves while the chip computes.

    Attributes:
      residuals: of the bytes that forwards keep for backwards.
      boundaries: of the layers' inputs among them, which are all that remat "layer" keeps.
      optimizer: of the optimiser's state; 0 or 1.
    """

    residuals: float = 0
    boundaries: float = 0
    optimizer: float = 0


WORDS = tuple(field.name for field in fields(Offload))


def as_offload(offload: str | Sequence[str] | Mapping[str, float]) -> Offload:
    """Makes an `Offload` of what a user passed: a word, several, or a share by word.

    Raises:
      ValueError: an unknown word, or a share that is none.
      TypeError: anything else.
    """
    words = (offload,) if isinstance(offload, str) else offload
    if isinstance(words, bytes) or not isinstance(words, Iterable):
        raise TypeError(f"offload={offload!r} is neither a word nor several; use some of {list(WORDS)}")
    shares = dict(words.items() if isinstance(words, Mapping) else ((str(word), 1) for word in words))
    for word, share in shares.items():
        if word not in WORDS:
            raise ValueError(f"offload={word!r} is unknown; use some of {list(WORDS)}, or a dict of shares by these")
        remedy = "use 0 or 1: all of it, or nothing" if word == "optimizer" else "use a share from 0 to 1"
        number = as_number(f"offload[{word!r}]", share, remedy)
        if number > 1 or (word == "optimizer" and number not in (0, 1)):
            raise ValueError(f"offload[{word!r}]={share!r}; {remedy}")
    return Offload(**{word: float(share) for word, share in shares.items()})


ENDS = ("own", "spread", "shared")
"""Where the weights of the first and the last layers lie, and who computes with them."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """The arguments of `jpipe.Pipeline`, checked and adapted.

    Attributes:
      layers: those of a list, behind the one interface.
      whole: a model that is one module, as one layer; then there is no list.
      loss_fn: of a micro-batch; None of a pipeline that only applies and generates.
      read_inputs: batch -> what the first layer takes.
      remat: what a forward stores for its backward.
      merge: rules by collection that the user set, for those other than parameters.
      balance: by what, or where, layers are cut into stages.
      schedule: who does what in which order, in training.
      mesh: the devices, K of them along `stage`.
      splits: over which mesh axes besides `stage` weights and examples are split.
      ends: weights that only the first or only the last stage holds lie there, and all stages have room for them
        ("own"), or are split over all stages at rest ("spread"). Or those of the first and the last layer alone are,
        and all stages compute these layers together ("shared").
      offload: what lies in the memory of the hosts.
      loss_over: what a loss of one number is taken over (`jpipe.model.loss.OVER`).

    Raises:
      ValueError: an unknown word; a schedule that doesn't train; a split backward of which nothing is kept, an R where
        all is; shared ends with a schedule that doesn't suit them.
    """

    layers: tuple[AnyLayer, ...]
    whole: AnyLayer | None
    loss_fn: LossFn | None
    read_inputs: Callable[[Batch], PyTree]
    remat: Remat
    merge: Mapping[str, str]
    balance: Balance
    schedule: Schedule
    mesh: Mesh
    splits: Splits
    ends: str
    offload: Offload
    loss_over: str | None

    def __post_init__(self) -> None:
        if not self.schedule.trains:
            raise ValueError(f"schedule {self.schedule.name!r} has no backward actions, so it can't train; use '1f1b'")
        if self.ends not in ENDS:
            raise ValueError(f"ends={self.ends!r} is unknown; use one of {list(ENDS)}")
        if self.loss_over not in OVER:
            raise ValueError(f"loss_over={self.loss_over!r} is unknown; use 'batch' or 'microbatch', or leave it out")
        if self.schedule.splits and self.remat.keep_inputs:
            raise ValueError(
                f'schedule={self.schedule.name!r} has actions W; use remat="none" or "layer", or a schedule without W'
            )
        if self.remat.keep_inputs and (self.offload.residuals or self.offload.boundaries):
            raise ValueError(
                'remat="stage" or "full" leaves no residuals or boundaries to offload; use remat="none" or "layer"'
            )
        if "R" in self.schedule.kinds and not self.remat.keep_inputs:
            raise ValueError(
                f'schedule={self.schedule.name!r} has actions R; use remat="stage" or "full", or a schedule without R'
            )
        if self.shares_ends:
            _check_order(self.schedule)

    @property
    def shares_ends(self) -> bool:
        """Whether all stages compute the first and the last layer together."""
        return self.ends == "shared" and self.schedule.num_stages > 1

    def check_has_loss(self) -> None:
        """Checks that there is a loss; without one a ValueError."""
        if self.loss_fn is None:
            raise ValueError("this pipeline has no loss; make one with a loss: jpipe.Pipeline(layers, loss_fn, ...)")

    @property
    def rules(self) -> dict[str, str]:
        """The rules for collections other than parameters, by name."""
        return {**DEFAULT_RULES, **self.merge}


def _check_order(schedule: Schedule) -> None:
    """Checks that the last virtual stage goes backwards right after each forward, for ends that all stages share."""
    place, waiting = schedule.placement, None
    for action in schedule.actions[place.ends[1]]:
        if action.chunk == schedule.num_chunks - 1 and action.kind == "F":
            if waiting is not None:
                several = f"'interleaved' and a num_microbatches that {schedule.num_stages} divides"
                raise ValueError(
                    f"ends='shared', but {schedule.name!r} has {action} before the backward of {waiting}: use "
                    f"schedule={several if schedule.num_chunks > 1 else repr('1f1b')}, or ends='spread'"
                )
            waiting = action
        elif action.chunk == schedule.num_chunks - 1 and action.kind in "BI":
            waiting = None
