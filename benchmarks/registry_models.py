"""Models that people have, each handed to `jpipe.Pipeline` as the one module that it is, beside plain JAX in float64.

    pip install "transformers<5" flaxmodels "diffusers<0.36" jraph dm-haiku equinox keras
    pip install haliax==1.4.dev453 && pip install --no-deps levanter==1.2.dev1644
    python benchmarks/registry_models.py
    python benchmarks/registry_models.py --models FlaxGPT2 --schedules 1f1b zero_bubble interleaved --rate 0.2

Models whose package isn't installed are left out. Sizes are small, weights random. `lines` are what a user writes: the
call of `jpipe.Pipeline`, and `inputs=` if the model takes more than one array. Loss and gradients are compared with
those of a plain loop over micro-batches, by the largest difference, beside the largest gradient. With `--rate` dropout
is on.
"""

import argparse
import importlib.util
import inspect
import time
import warnings
from typing import Any

import jax
from common import console, on_cpu, show, versions
from package_models import MODELS

import jpipe
import plain_whole  # of tests/helpers, as what it compares with
from whole_models import Case

CHUNKS = {"interleaved": 2, "v": 2}


def differences(
    case: Case, variables: Any, expected: Any, num_stages: int, schedule: str
) -> tuple[float, float, float]:
    """(of the loss, of the gradients, the CPU seconds until the first step is done), with M=4."""
    begin = time.process_time()
    pipe = jpipe.Pipeline(
        case.model,
        case.loss,
        inputs=case.inputs,
        num_stages=num_stages,
        num_microbatches=4,
        schedule=schedule,
        num_chunks=CHUNKS.get(schedule, 1),
        remat="none" if schedule == "zero_bubble" else "layer",
    )
    placed = pipe.from_model_variables(plain_whole.of_model(case, variables), case.batch)
    (loss, _), gradients = jax.block_until_ready(pipe.value_and_grad(placed, case.batch, jax.random.key(3)))
    seconds = time.process_time() - begin
    own, plain = pipe.model_variables({"params": gradients}), plain_whole.of_model(case, {"params": expected[1]})
    of_gradients = plain_whole.difference(own, plain)
    return abs(float(loss) / float(expected[0]) - 1), of_gradients, seconds


def row(name: str, case: Case, num_stages: int, schedules: list[str]) -> tuple[Any, ...]:
    """A model's row of the table."""
    variables = plain_whole.made(case)
    loss, _, gradients = plain_whole.plain(case, variables, 4, jax.random.key(3))
    micro = jax.tree.map(lambda a: a[: a.shape[0] // 4], case.batch)
    found = jpipe.layers_of(case.model, micro, case.loss, inputs=case.inputs, num_layers=num_stages)
    flops = [layer.flops for layer in found]
    results = [differences(case, variables, (loss, gradients), num_stages, schedule) for schedule in schedules]
    of_loss, of_gradients, _ = map(max, zip(*results, strict=True))
    kinds = len({layer.same_as for layer in found})
    worst = (f"{of_loss:.0e}", f"{of_gradients:.0e}")
    lines = 1 + (case.inputs is not None)
    return name, lines, len(found), kinds, f"{max(flops) / sum(flops):.1%}", *worst, f"{results[0][2]:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="(default: all)")
    parser.add_argument("--stages", type=int, default=2, help="K (default %(default)s)")
    parser.add_argument("--schedules", nargs="+", default=["1f1b"], help="each is compared (default %(default)s)")
    parser.add_argument("--rate", type=float, default=0.0, help="of dropout (default %(default)s)")
    options = parser.parse_args()
    on_cpu(options.stages)
    rows = []
    warnings.simplefilter("ignore", UserWarning)  # of small models: a layer over its share
    for name in options.models:
        package, make = MODELS[name]
        if package and importlib.util.find_spec(package) is None:
            console.print(f"{name}: {package} isn't installed")
            continue
        rate = {"rate": options.rate} if options.rate and "rate" in inspect.signature(make).parameters else {}
        with plain_whole.in_float64():
            rows.append(row(name, make(**rate), options.stages, options.schedules))
    columns = ("model", "lines", "layers", "functions", "largest", "loss", "gradients", "CPU seconds to the first step")
    caption = f"{versions(tpu=False)}, K={options.stages}, M=4, {', '.join(options.schedules)}, dropout {options.rate}"
    show("Models as they are, float64", columns, rows, caption)


if __name__ == "__main__":
    main()
