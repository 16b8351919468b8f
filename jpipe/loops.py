"""Control flow that never copies what it passes on.

A `lax.cond` or `lax.switch` copies the buffers that a branch hands through (accumulators, residuals), a loop updates
them in place. So whatever a stage may or may not do here is a loop with as many trips as it has layers to run, none
if it has none. Bounds that are Python integers are resolved while tracing.

A compiler may move what doesn't change from trip to trip out of a loop, and then computes it for zero trips too. What a
body works on is therefore tied to the trip by `anchor`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def when(condition: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """`body(trip, carry)` if `condition` (a Python or traced bool) holds, else `carry`."""
    if isinstance(condition, bool):
        return body(0, carry) if condition else carry
    return jax.lax.fori_loop(0, jnp.asarray(condition, jnp.int32), body, carry)


def anchor(values: Any, trip: Any) -> Any:
    """`values`, unchanged, as if they depended on the trip of a loop."""
    return values if isinstance(trip, int) else jax.lax.optimization_barrier((values, trip))[0]


def each(start: Any, stop: Any, body: Callable[[Any, Any], Any], carry: Any, *, reverse: bool = False) -> Any:
    """`carry = body(i, carry)` for i from `start` to `stop` (Python or traced integers), or backwards."""
    if isinstance(start, int) and isinstance(stop, int) and stop - start <= 1:
        return body(start, carry) if stop > start else carry
    visit = (lambda i, c: body(start + stop - 1 - i, c)) if reverse else body
    return jax.lax.fori_loop(start, stop, visit, carry)
