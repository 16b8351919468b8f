"""Gradients of a dense layer's weights on one CPU core: as JAX's derivative has them, and as jpipe computes them.

A loop adds up the gradients of some micro-batches, as a stage does. Ratios compare both in one process.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from common import in_turns, on_cpu, settings, show
from jax.extend.core import jaxpr_as_fun

from jpipe.jax.rewrites import weight_products_as_they_lie

COUNT = 4  # micro-batches
WEIGHTS = [(256, 256), (256, 1024), (1024, 256), (768, 3072), (3072, 768)]
ROWS = [256, 512, 2048]  # of a micro-batch


def summed(rows: int, n: int, m: int, dtype: str, *, as_they_lie: bool) -> Callable[[], tuple[float, float]]:
    """Adds up the gradients of an `[n, m]` weight: (processor seconds, the norm of the sum)."""
    keys = jax.random.split(jax.random.key(0))
    xs, dys = (jax.random.normal(key, (COUNT, 4, rows // 4, d), dtype) for key, d in zip(keys, (n, m), strict=True))
    w = jnp.zeros((n, m), dtype)
    closed = jax.make_jaxpr(lambda x, dy: jax.vjp(lambda w: jnp.tanh(x) @ w, w)[1](dy)[0])(xs[0], dys[0])
    gradient = jaxpr_as_fun(weight_products_as_they_lie(closed) if as_they_lie else closed)

    @jax.jit
    def add_up(xs: Any, dys: Any) -> Any:
        add = lambda total, given: (total + gradient(*given)[0], None)
        return jax.lax.scan(add, jnp.zeros((n, m)), (xs, dys))[0]

    def run() -> tuple[float, float]:
        begin = time.process_time()
        total = jax.block_until_ready(add_up(xs, dys))
        return time.process_time() - begin, float(jnp.linalg.norm(total))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", default="float32", help="of inputs and cotangents (default %(default)s)")
    parser.add_argument("--repetitions", type=int, default=6, help="(default %(default)s)")
    options = parser.parse_args()
    on_cpu(core=0)
    found = []
    for rows in ROWS:
        for n, m in WEIGHTS:
            ways = {"JAX": False, "jpipe": True}
            variants = {w: summed(rows, n, m, options.dtype, as_they_lie=lies) for w, lies in ways.items()}
            seconds = in_turns(variants, options.repetitions)
            times = (f"{seconds[way] / COUNT * 1e3:.2f}" for way in ways)
            found.append((f"{rows} x {n} -> {m}", *times, f"{seconds['jpipe'] / seconds['JAX']:.2f}"))
    columns = ["rows x inputs -> outputs", "JAX's derivative, ms", "jpipe, ms", "of JAX's"]
    show("A weight's gradient", columns, found, settings(jax.devices()[0], options.dtype, "one core"))


if __name__ == "__main__":
    main()
