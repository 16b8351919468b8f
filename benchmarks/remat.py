"""What each remat mode computes and keeps.

Every matrix multiplication of the model counts itself when it runs, so the figures are what the compiled step did. In
units of F, one forward pass: a step without remat does F forward and B = 2F backward. Recomputing a layer stops at
the last residual that its backward pass needs, so that a mode can stay below its textbook figure.
"""

import argparse
from collections import Counter
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import compiled_step, mib, on_cpu, settings, show

import jpipe

TEXTBOOK = {"none": "F + B = 3", "layer": "2F + B = 4", "stage": "2F + B = 4", "full": "3F + B = 5"}
counted: Counter = Counter()


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul(name, x, w):
    """`x @ w`, which adds its FLOPs to `counted[name]` when it runs."""
    return _counting(name, x, w)


def _counting(name, x, w):
    def run(x, w):
        counted[name] += 2 * np.prod(x.shape) * w.shape[1]
        return np.asarray(x) @ np.asarray(w)

    return jax.pure_callback(run, jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype), x, w)


def _backward(name, residuals, g):
    x, w = residuals
    return _counting("backward", g, w.T), _counting("backward", x.T, g)


matmul.defvjp(lambda name, x, w: (_counting(name, x, w), (x, w)), _backward)


class Block(nn.Module):
    """A feed-forward block, `[B, width]` to the same, of two counted multiplications."""

    hidden: int

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        up = self.param("up", nn.initializers.lecun_normal(), (width, self.hidden))
        down = self.param("down", nn.initializers.lecun_normal(), (self.hidden, width))
        return x + matmul("second", nn.gelu(matmul("first", nn.LayerNorm()(x), up)), down)


def loss_fn(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", type=int, default=4, help="K (default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="M (default %(default)s)")
    parser.add_argument("--layers", type=int, default=12, help="(default %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="(default %(default)s)")
    parser.add_argument("--rows", type=int, default=64, help="of a micro-batch (default %(default)s)")
    options = parser.parse_args()
    on_cpu(options.stages)
    m, shape = options.microbatches, (options.rows * options.microbatches, options.width)
    batch = {name: np.random.default_rng(0).normal(size=shape).astype(np.float32) for name in ("inputs", "targets")}
    forward = 2 * 2 * shape[0] * options.width * 4 * options.width * options.layers
    tx, rows = optax.sgd(1e-3), []
    for remat in TEXTBOOK:
        pipe = jpipe.Pipeline(
            [Block(4 * options.width) for _ in range(options.layers)],
            loss_fn,
            num_stages=options.stages,
            num_microbatches=m,
            remat=remat,
        )
        temporaries = compiled_step(pipe, tx, batch).memory_analysis().temp_size_in_bytes
        state = pipe.create_state(jax.random.key(0), batch, tx)
        counted.clear()
        jax.block_until_ready(pipe.train_step(state, batch))
        once = forward / 2
        first, second, total = counted["first"] / once, counted["second"] / once, sum(counted.values()) / forward
        rows.append((remat, TEXTBOOK[remat], f"{first:.2f}", f"{second:.2f}", f"{total:.2f}", mib(temporaries)))
    caption = settings(
        jax.devices()[0],
        f"K={options.stages}",
        f"M={m}",
        "1f1b",
        f"{options.layers} feed-forward blocks of width {options.width}, {options.rows} rows",
    )
    columns = ("remat", "textbook", "1st matmul runs", "2nd matmul runs", "FLOPs / F", "temporary MiB")
    show("What each remat mode computes and keeps", columns, rows, caption)


if __name__ == "__main__":
    main()
