"""One training run with K=1 and with K=4: how far their losses are apart, step by step.

    python benchmarks/same_losses.py translation --steps 100
    python benchmarks/same_losses.py digits --steps 100 --float64

Both have the same micro-batches, seeds and batches, so that what differs is the order of sums. In float32 such
differences grow with training. How much that is by itself shows K=1 once more, from weights that are one rounding off.
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import cluster
import digits
import jax
import names
import numpy as np
import translate
from rich.console import Console

import jpipe

SEED = 0


def translation(stages: int, dtype: str) -> tuple[jpipe.Pipeline, list, object]:
    options = translate.parse_options(["--stages", str(stages), "--steps", "400"])
    learnt, _ = names.read()
    vocabulary = names.Vocabulary.train(learnt, options.tokens)
    examples = [names.Examples.encode(pairs, vocabulary) for pairs in learnt.values()]
    stream = names.batches(examples, 64, options.temperature, SEED)
    return translate.make_pipeline(options, vocabulary.size, dtype=dtype), stream, translate.make_optimizer(options)


def images(stages: int, dtype: str) -> tuple[jpipe.Pipeline, list, object]:
    options = digits.parse_options(["--stages", str(stages)])
    training, _ = digits.read_digits()
    training = {**training, "inputs": training["inputs"].astype(dtype)}
    random = np.random.default_rng(SEED)
    stream = (batch for _ in range(10**6) for batch in digits.epoch(training, options.batch, random))
    return digits.make_pipeline(options, dtype=dtype), stream, digits.make_optimizer(132, options.lr)


MODELS = {"translation": translation, "digits": images}


def losses(model: str, stages: int, steps: int, dtype: str, *, nudged: bool = False) -> np.ndarray:
    """Of each step, trained with K stages; `nudged` from weights that are larger by one rounding."""
    pipe, stream, tx = MODELS[model](stages, dtype)
    batches = list(islice(stream, steps))
    state, found = pipe.create_state(jax.random.key(SEED), batches[0], tx), []
    if nudged:
        larger = jax.tree.map(lambda a: a * (1 + np.finfo(dtype).eps), state.variables["params"])
        state = state.replace(variables=state.variables | {"params": larger})
    for batch in batches:
        state, metrics = pipe.train_step(state, batch)
        found.append(metrics["loss"])
    return np.array(jax.device_get(found), np.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=100, help="(default %(default)s)")
    parser.add_argument("--float64", action="store_true", help="compute in float64 (default: float32)")
    options = parser.parse_args()
    cluster.simulate_devices(4)
    jax.config.update("jax_enable_x64", options.float64)
    dtype = "float64" if options.float64 else "float32"
    one, four = (losses(options.model, stages, options.steps, dtype) for stages in (1, 4))
    nudged = losses(options.model, 1, options.steps, dtype, nudged=True)
    apart, by_itself = np.abs(four / one - 1), np.abs(nudged / one - 1)
    console = Console()
    console.print(f"{options.model} in {dtype}, K=4 beside K=1: losses from {one[0]:.4f} to {one[-1]:.4f}")
    for step in sorted({1, 2, 5, 10, 20, 50, 100, options.steps} & set(range(options.steps + 1))):
        both = f"{four[step - 1]:.9f}, {one[step - 1]:.9f}"
        console.print(
            f"  step {step:3}: {both}; up to it at most {apart[:step].max():.1e} apart, "
            f"and K=1 nudged {by_itself[:step].max():.1e}",
            soft_wrap=True,
        )


if __name__ == "__main__":
    main()
