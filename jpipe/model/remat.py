"""Decides what a forward action keeps for its backward action (`remat=`; GPipe, section 2.3).

Two choices make up every mode. What waits between forward and backward: the layers' residuals, or the stage's input
alone (the residuals are then made in the backward action, for one micro-batch). And which residuals a layer has: those
that its `jax.checkpoint` policy saves.

| mode     | waits          | a layer's residuals      | computed in all |
|----------|----------------|--------------------------|-----------------|
| "none"   | residuals      | all but the elementwise  | F + B           |
| "layer"  | residuals      | its input                | 2F + B          |
| policy   | residuals      | what it saves            | between         |
| "stage"  | stage's input  | all but the elementwise  | 2F + B          |
| "full"   | stage's input  | its input                | 3F + B          |

What an elementwise operation gives (an activation, a normalised or masked value) is made again from its operands, which
takes less time than to write it down and read it back: a gelu alone has six such residuals. A policy of
`jax.checkpoint_policies.everything_saveable` does keep them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import Offloadable
from jax.extend.core import Primitive

from jpipe.jax.flat_jaxpr import aval_of
from jpipe.jax.in_place import DEVICE, HOST
from jpipe.jax.primitives import CHEAP, JaxprEqn

Policy = Callable[..., bool]
"""As `jax.checkpoint` takes it: `(primitive, *operands' types, **parameters) -> whether to save what it gives`."""


@dataclass(frozen=True)
class Remat:
    """A rematerialisation mode.

    Attributes:
      keep_inputs: the stage's input waits for the backward action, instead of the layers' residuals.
      policy: a `jax.checkpoint` policy for each layer.
    """

    keep_inputs: bool
    policy: Policy

    def wrap(self, function: Callable) -> Callable:
        """Puts a function under the policy."""
        # Forward and backward are in different loops: there is nothing to guard against common subexpressions.
        return jax.checkpoint(function, policy=cast(Policy, partial(_answer, self.policy)), prevent_cse=False)


def save_but_elementwise(primitive: Primitive, *_: object, **__: object) -> bool:
    """A `jax.checkpoint` policy that saves all but what elementwise operations give."""
    return primitive.name not in CHEAP


def _answer(policy: Policy, primitive: Primitive, *types: object, **parameters: object) -> bool | Offloadable:
    """Asks a policy about an operation.

    Where it offloads, JAX is told to move the result from the device to the device. So traces have marks of it
    (`is_mark`), which come out of them again: the pipeline moves rows of many layers, at other times.

    Raises:
      TypeError: it fails, or answers with another policy.
      ValueError: it offloads to something else than the host.
    """
    try:
        answer = policy(primitive, *types, **parameters)
    except TypeError as error:
        answer = error
    name = getattr(policy, "__qualname__", repr(policy))
    if callable(answer) or isinstance(answer, TypeError):
        raise TypeError(f"remat={name} is no jax.checkpoint policy: it gave {answer!r}; if it makes policies, call it")
    if isinstance(answer, Offloadable):
        if (answer.src, answer.dst) != (DEVICE, HOST):
            raise ValueError(f"remat={name} offloads from {answer.src!r} to {answer.dst!r}; use {DEVICE!r}, {HOST!r}")
        return Offloadable(answer.src, answer.src)
    return answer


def is_mark(equation: JaxprEqn) -> bool:
    """Whether an equation only marks that a policy offloads its operand, or had it offloaded: nothing moves by it."""
    device = jax.memory.Space.Device
    is_put = equation.primitive.name == "device_put" and equation.params["devices"] == (device,)
    return is_put and all(aval_of(operand).memory_space == device for operand in equation.invars)


_NOTHING = jax.checkpoint_policies.nothing_saveable
MODES = {
    "none": Remat(False, save_but_elementwise),
    "layer": Remat(False, _NOTHING),
    "stage": Remat(True, save_but_elementwise),
    "full": Remat(True, _NOTHING),
}


def as_remat(remat: str | Policy) -> Remat:
    """Finds the mode of a name, or makes one of a `jax.checkpoint` policy.

    Raises:
      ValueError: an unknown name (the known ones are listed), or a policy that offloads products to another memory.
      TypeError: neither a name nor a policy, or a function that makes policies.
    """
    if isinstance(remat, str):
        if remat not in MODES:
            raise ValueError(f"remat={remat!r} is unknown; use one of {sorted(MODES)} or a jax.checkpoint policy")
        return MODES[remat]
    if callable(remat):
        mode = Remat(False, remat)
        function = mode.wrap(lambda x: jnp.sin(x @ x))  # the policy is asked about a product and a sine
        jax.eval_shape(lambda x: jax.vjp(function, x)[0], jax.ShapeDtypeStruct((2, 2), jnp.float32))
        return mode
    raise TypeError(f"remat={remat!r} is neither a name ({sorted(MODES)}) nor a jax.checkpoint policy")
