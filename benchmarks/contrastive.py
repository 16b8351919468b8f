"""What an exact contrastive loss costs: towers as CLIP's, the whole batch's negatives (`loss_over="batch"`).

Beside it plain JAX on the whole batch on one device, and each micro-batch's own negatives (`loss_over="microbatch"`),
which is another loss.
"""

import argparse
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import mib, on_cpu, settings, show

import jpipe


class Towers(nn.Module):
    """Two towers of feed-forward blocks, `[B, width]` each, to two embeddings `[B, width]` of length one."""

    blocks: int

    @nn.compact
    def __call__(self, images, texts):
        width = images.shape[-1]
        for _ in range(self.blocks):
            images, texts = (
                x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x)))) for x in (images, texts)
            )
        unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        return unit(images), unit(texts)


def loss_fn(embeddings, batch):
    images, texts = embeddings
    logits, own = 20 * images @ texts.T, jnp.arange(len(images))
    each = optax.softmax_cross_entropy_with_integer_labels
    return (each(logits, own).mean() + each(logits.T, own).mean()) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", type=int, default=2, help="K (default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="M (default %(default)s)")
    parser.add_argument("--blocks", type=int, default=8, help="of each tower (default %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="(default %(default)s)")
    parser.add_argument("--rows", type=int, default=1024, help="of the mini-batch (default %(default)s)")
    parser.add_argument("--repetitions", type=int, default=5, help="(default %(default)s)")
    options = parser.parse_args()
    on_cpu(options.stages)
    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(options.rows, options.width)).astype(np.float32) for name in ("images", "texts")}
    model, inputs = Towers(options.blocks), lambda batch: (batch["images"], batch["texts"])
    tree = model.init(jax.random.key(0), *inputs(batch))
    programs = {
        "plain JAX, the whole batch on one device": (
            jax.jit(jax.value_and_grad(lambda tree, batch: loss_fn(model.apply(tree, *inputs(batch)), batch))),
            tree,
        )
    }
    for over in ("batch", "microbatch"):
        sizes = {"num_stages": options.stages, "num_microbatches": options.microbatches}
        pipe = jpipe.Pipeline(model, loss_fn, inputs=inputs, loss_over=over, **sizes)
        variables = pipe.from_model_variables(tree, batch)
        run = jax.jit(lambda variables, batch, pipe=pipe: pipe.value_and_grad(variables, batch))
        programs[f'jpipe, loss_over="{over}"'] = run, variables
    compiled = {name: run.lower(given, batch).compile() for name, (run, given) in programs.items()}
    value = lambda result: np.ravel(jax.tree.leaves(result[0])[0])[0]
    losses = {name: float(value(run(programs[name][1], batch))) for name, run in compiled.items()}
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(options.repetitions):
        for name, run in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(run(programs[name][1], batch))
            seconds[name].append(time.perf_counter() - start)
    first = min(seconds["plain JAX, the whole batch on one device"])
    rows = [
        (
            name,
            f"{losses[name]:.5f}",
            f"{min(seconds[name]):.3f}",
            f"{min(seconds[name]) / first:.2f}",
            mib(run.memory_analysis().temp_size_in_bytes),
        )
        for name, run in compiled.items()
    ]
    caption = settings(
        jax.devices()[0],
        f"K={options.stages}",
        f"M={options.microbatches}",
        f"two towers of {options.blocks} blocks of width {options.width}, {options.rows} rows",
    )
    show("A contrastive loss", ("program", "loss", "seconds", "beside plain", "temporary MiB a device"), rows, caption)


if __name__ == "__main__":
    main()
