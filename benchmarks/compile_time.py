"""Time to trace and to compile a training step, by number of micro-batches and of stages.

A run of equal blocks is traced and compiled once however long it is and however it is cut, and the loop over ticks once
however many there are. Blocks with a rate of stochastic depth by depth are compiled once, and traced one by one.
Compiling for simulated devices: no step is run.
"""

import argparse
import time

import flax.linen as nn
import jax
import optax
from common import Block, Size, batch_shapes, make_layers, on_cpu, settings, show, transformer_pipeline

SIZE = Size(layers=16, width=256, heads=4, seq=128, vocab=256, microbatch=2)
RATES = {"": None, ", equal rates": lambda depth: 0.1, ", a rate by depth": lambda depth: 0.1 * depth}


class Dropped(nn.Module):
    """A block that is left out for some examples."""

    block: Block
    rate: float

    @nn.compact
    def __call__(self, x, train: bool):
        drop = nn.Dropout(self.rate, broadcast_dims=(1, 2), deterministic=not train)
        return x + drop(self.block(x) - x)


def layers_of(size: Size, rates: str) -> list[nn.Module]:
    """The model, its blocks with rates of stochastic depth; the depth of a block is from 0 to 1."""
    first, *blocks, last = make_layers(size)
    if rate := RATES[rates]:
        blocks = [Dropped(block, rate((i + 1) / size.layers)) for i, block in enumerate(blocks)]
    return [first, *blocks, last]


def compile_seconds(size: Size, num_stages: int, num_microbatches: int, rates: str, remat: str) -> tuple[float, float]:
    """Processor seconds to trace and lower, and to compile, with all caches empty."""
    jax.clear_caches()
    batch, tx = batch_shapes(size, num_microbatches), optax.adamw(1e-4)
    begin = time.process_time()
    pipe = transformer_pipeline(size, num_stages, num_microbatches, layers_of(size, rates), remat=remat)
    lowered = jax.jit(pipe.train_step, donate_argnums=0).lower(pipe.abstract_state(batch, tx), batch)
    middle = time.process_time()
    lowered.compile()
    return middle - begin, time.process_time() - middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--remat", default="layer", help="(default %(default)s)")
    parser.add_argument("--repetitions", type=int, default=3, help="(default %(default)s)")
    Size.add_arguments(parser, SIZE)
    options = parser.parse_args()
    on_cpu(8)
    size = Size.of(options)
    pairs = [((4, 8, ""), (4, 64, "")), ((2, 16, ""), (8, 16, "")), [(4, 8, rates) for rates in list(RATES)[1:]]]
    configurations = [configuration for pair in pairs for configuration in pair]
    compile_seconds(size, 2, 2, "", options.remat)  # imports, and whatever else is done once
    found = {c: [] for c in configurations}
    for _ in range(options.repetitions):
        for c in configurations:
            found[c].append(compile_seconds(size, *c, options.remat))
    rows, shortest = [], {c: (min(t for t, _ in found[c]), min(t for _, t in found[c])) for c in configurations}
    for base, other in pairs:
        for k, m, rates in (base, other):
            trace, compile_ = shortest[k, m, rates]
            ratio = (trace + compile_) / sum(shortest[base])
            rows.append(
                (f"K={k}, M={m}{rates}", f"{trace:.2f}", f"{compile_:.2f}", f"{trace + compile_:.2f}", f"{ratio:.3f}")
            )
    caption = settings(jax.devices()[0], size, f"remat {options.remat}", f"shortest of {options.repetitions}, in turns")
    columns = ("configuration", "trace, s", "compile, s", "both, s", "of the row's baseline")
    show("Compile time of a training step", columns, rows, caption)


if __name__ == "__main__":
    main()
