"""The memory model against compiled training steps: what it predicts, what the compiler says, by configuration."""

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from common import Size, batch_shapes, compiled_step, mib, on_cpu, settings, show, transformer_pipeline
from jax.sharding import Mesh

from jpipe.forecasting.memory_model import predict_memory

OPTIMIZERS = {"adam": optax.adam(1e-3), "sgd": optax.sgd(1e-3)}


def configurations() -> Iterator[dict[str, Any]]:
    """84 of them."""
    schedules = (("1f1b", 1), ("gpipe", 1), ("zero_bubble", 1), ("interleaved", 2))
    meshes = ((2, 1, 4), (4, 1, 8), (2, 2, 8))
    for (K, data, M), tx, remat, (schedule, V) in itertools.product(
        meshes, OPTIMIZERS, ("none", "layer", "stage", "full"), schedules
    ):
        if schedule == "zero_bubble" and remat in ("stage", "full"):  # would compute the forward twice
            continue
        yield {"K": K, "data": data, "M": M, "V": V, "tx": tx, "schedule": schedule, "remat": remat}


def compare(size: Size, given: dict[str, Any]) -> tuple[int, int]:
    """(predicted, compiled) bytes of a device."""
    num_stages, data, tx = given["K"], given["data"], OPTIMIZERS[given["tx"]]
    devices = np.asarray(jax.devices()[: num_stages * data]).reshape(num_stages, data)
    options = {"schedule": given["schedule"], "remat": given["remat"], "num_chunks": given["V"]}
    pipe = transformer_pipeline(size, num_stages, given["M"], mesh=Mesh(devices, ("stage", "data")), **options)
    batch = batch_shapes(size, given["M"])
    memory = compiled_step(pipe, tx, batch).memory_analysis()
    compiled = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return predict_memory(pipe, batch, tx).total, compiled + memory.output_size_in_bytes - memory.alias_size_in_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="only each n-th configuration (default %(default)s)")
    Size.add_arguments(parser, Size(8, 128, 4, 128, 256, 4))
    options = parser.parse_args()
    on_cpu(8)
    size, rows, errors = Size.of(options), [], []
    for given in list(configurations())[:: options.every]:
        predicted, compiled = compare(size, given)
        errors.append(predicted / compiled - 1)
        name = ", ".join(f"{value}" if isinstance(value, str) else f"{key}={value}" for key, value in given.items())
        rows.append((name, mib(predicted), mib(compiled), f"{errors[-1]:+.1%}"))
    sizes = np.abs(errors)
    caption = f"of {len(rows)} the worst is off by {sizes.max():.1%}, the median by {np.median(sizes):.1%}"
    show(
        "Bytes of a step, MiB a device",
        ("step", "predicted", "compiled", "error"),
        rows,
        settings(jax.devices()[0], size, caption),
    )


if __name__ == "__main__":
    main()
