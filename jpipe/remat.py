"""Rematerialisation: what a forward action keeps for its backward action (GPipe, section 2.3).

Two choices make up every mode. What waits between forward and backward: the layers' residuals, or the stage's input
alone (the residuals are then made in the backward action, for one micro-batch). And which residuals a layer has: those
that its `jax.checkpoint` policy saves.

| mode     | waits          | a layer's residuals | computed in all |
|----------|----------------|---------------------|-----------------|
| "none"   | residuals      | all                 | F + B           |
| "layer"  | residuals      | its input           | 2F + B          |
| policy   | residuals      | what it saves       | between         |
| "stage"  | stage's input  | all                 | 2F + B          |
| "full"   | stage's input  | its input           | 3F + B          |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Remat:
    """A rematerialisation mode.

    Attributes:
      keep_inputs: the stage's input waits for the backward action, instead of the layers' residuals.
      policy: a `jax.checkpoint` policy for each layer; None saves everything.
    """

    keep_inputs: bool
    policy: Callable[..., Any] | None

    def wrap(self, function: Callable) -> Callable:
        """`function` under the policy."""
        if self.policy is None:
            return function
        # Forward and backward are in different loops: there is nothing to guard against common subexpressions.
        return jax.checkpoint(function, policy=self.policy, prevent_cse=False)


_NOTHING = jax.checkpoint_policies.nothing_saveable
MODES = {
    "none": Remat(False, None),
    "layer": Remat(False, _NOTHING),
    "stage": Remat(True, None),
    "full": Remat(True, _NOTHING),
}


def as_remat(remat: Any) -> Remat:
    """The mode of a name, or of a `jax.checkpoint` policy.

    Raises:
      ValueError: an unknown name (the known ones are listed).
      TypeError: neither a name nor a policy.
    """
    if isinstance(remat, str):
        if remat not in MODES:
            raise ValueError(f"remat={remat!r} is unknown; use one of {sorted(MODES)} or a jax.checkpoint policy")
        return MODES[remat]
    if callable(remat):
        return Remat(False, remat)
    raise TypeError(f"remat={remat!r} is neither a name ({sorted(MODES)}) nor a jax.checkpoint policy")
