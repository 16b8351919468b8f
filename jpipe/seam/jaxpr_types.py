"""Names the types of jaxprs alike for every version of JAX.

From JAX 0.12 on `ClosedJaxpr` is another name of `Jaxpr`, where it was a class around it. Both have `.jaxpr` and
`.consts`, so code that unpacks a `ClosedJaxpr` runs on either. Type checkers take the newer name for private to JAX,
and no longer know the shape of what a jaxpr takes and gives.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from jax.extend import core
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import JaxprEqn as JaxprEqn
from jax.extend.core import Literal as Literal
from jax.extend.core import Var as Var

ClosedJaxpr: TypeAlias = core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
"""A jaxpr with the constants that it reads."""


def shapes_of(variables: Sequence[Var | Literal]) -> list[jax.ShapeDtypeStruct]:
    """Lists the shapes and dtypes of variables of a jaxpr, all of them arrays."""
    avals: list[Any] = [v.aval for v in variables]
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
