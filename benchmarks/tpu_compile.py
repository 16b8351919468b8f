"""Training steps compiled for TPUs that aren't there: does it fit, and what does it send?

Four questions: the bytes of the example's step (examples/lm.py) on four v5e chips; how many layers of the GPipe paper's
Transformer-L (its table 1: width 2048, feed-forward 8192, 32 heads, sequence 1024, batch 32, RMSProp) fit eight TPU v3
cores of 16 GB; its AmoebaNet-D (18, 208) on four; and whether a model larger than one device can be initialised. Needs
`pip install libtpu`, and no TPU.
"""

import argparse
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import optax
from common import (
    Size,
    batch_shapes,
    compiled_step,
    console,
    mib,
    on_cpu,
    settings,
    show,
    stage_mesh,
    tpu_devices,
    transformer_pipeline,
)

import jpipe

COLLECTIVES = ("collective-permute", "all-reduce", "all-gather", "all-to-all", "reduce-scatter")
BYTES = ("arguments", "temporaries", "total", "collectives in loops")


def figures(compiled: Any) -> tuple[str, ...]:
    """MiB of arguments, temporaries and both a device, and the collectives inside of loops."""
    memory = compiled.memory_analysis()
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    found = ", ".join(f"{count} {name}" for name, count in collectives_in_loops(compiled.as_text()).items()) or "none"
    return mib(arguments), mib(temporaries), mib(arguments + temporaries + outputs), found


def collectives_in_loops(text: str) -> Counter:
    """The collectives in computations that a `while` runs, or that one of those calls."""
    computations: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if line.endswith("{") and (match := re.match(r"(?:ENTRY )?%?([\w.-]+) ", line)):
            name = match.group(1)
        computations.setdefault(name, []).append(line)
    calls = r"(?:body|condition|calls|to_apply|branch_computations)=\{?%?([\w.-]+)"
    reached = {
        body for lines in computations.values() for line in lines for body in re.findall(r"body=%?([\w.-]+)", line)
    }
    queue = list(reached)
    while queue:
        for callee in re.findall(calls, "\n".join(computations.get(queue.pop(), []))):
            if callee not in reached:
                reached.add(callee)
                queue.append(callee)
    lines = [line for name in reached for line in computations.get(name, [])]
    return Counter(m.group(1) for line in lines if (m := re.search(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", line)))


def demo(topology: str) -> None:
    """The example's own model, options and optimiser."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import lm

    options = lm.parse_options([])
    mesh = stage_mesh(tpu_devices(topology), options.stages)
    batch = {n: jax.ShapeDtypeStruct((options.batch, options.seq), "int32") for n in ("inputs", "targets")}
    rows = []
    for dtype in ("float32", "bfloat16"):
        options.dtype = dtype
        pipe = lm.make_pipeline(lm.make_model(options), options, mesh)
        rows.append((dtype, *figures(compiled_step(pipe, lm.make_optimizer(options), batch))))
    caption = settings(
        mesh.devices.flat[0], topology, f"K={options.stages}", f"M={options.microbatches}", "examples/lm.py"
    )
    show("The example's step, MiB a chip", ("dtype", *BYTES), rows, caption)


def transformer_l(topology: str, layers: list[int], vocab: int, **options: str) -> None:
    """The paper's largest model on eight cores had 103 layers."""
    mesh = stage_mesh(tpu_devices(topology), len(tpu_devices(topology)))
    stages, m = mesh.size, 32
    rows = []
    for count in layers:
        size = Size(count, 2048, 32, 1024, vocab, 1, "bfloat16")
        pipe = transformer_pipeline(size, stages, m, mesh=mesh, **options)
        begin = time.perf_counter()
        try:
            found = figures(compiled_step(pipe, optax.rmsprop(1e-4), batch_shapes(size, m)))
        except jax.errors.JaxRuntimeError as error:
            used = re.search(r"Used [\d.]+\w+ of [\d.]+\w+ hbm", str(error))
            found = ("-", "-", used.group() if used else "does not fit", "-")
        row = (f"{count} layers, {size.parameters / 1e9:.2f}B parameters", *found)
        rows.append((*row, f"{time.perf_counter() - begin:.0f}"))
    modes = f"K={stages}, M={m}, {vocab} words, {options}, bfloat16 activations"
    caption = settings(mesh.devices.flat[0], topology, modes)
    show("Transformer-L, MiB a core (16 GB each)", ("model", *BYTES, "compile, s"), rows, caption)


def amoebanet_d(topology: str, num_stages: int) -> None:
    """The paper's AmoebaNet-D (18, 208): 82M parameters, 224x224 images, a batch of 128."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from models import amoebanet

    mesh, m = stage_mesh(tpu_devices(topology), num_stages), 32
    batch = {
        "inputs": jax.ShapeDtypeStruct((128, 224, 224, 3), "float32"),
        "targets": jax.ShapeDtypeStruct((128,), "int32"),
    }
    begin = time.perf_counter()
    pipe = jpipe.Pipeline(
        amoebanet.amoebanet(18, 208, dtype="bfloat16"),
        amoebanet.loss_fn,
        num_stages=num_stages,
        num_microbatches=m,
        mesh=mesh,
    )
    found = figures(compiled_step(pipe, optax.rmsprop(1e-3), batch))
    row = ("AmoebaNet-D (18, 208)", *found, f"{time.perf_counter() - begin:.0f}")
    console.print(str(pipe.partition), highlight=False)
    caption = settings(mesh.devices.flat[0], topology, f"K={num_stages}", f"M={m}", "remat layer", "bfloat16")
    show("AmoebaNet-D, MiB a core (16 GB each)", ("model", *BYTES, "compile, s"), [row], caption)


def init(topology: str, count: int) -> None:
    """Each device makes its own stage's variables and nothing else."""
    mesh = stage_mesh(tpu_devices(topology), len(tpu_devices(topology)))
    size = Size(count, 2048, 32, 1024, 32000, 1, "bfloat16")
    stages = mesh.size
    pipe = transformer_pipeline(size, stages, 4, mesh=mesh)
    batch = batch_shapes(size, 4)
    key = jax.eval_shape(lambda: jax.random.key(0))
    compiled = jax.jit(lambda key: pipe.init(key, batch)).lower(key).compile()
    memory = compiled.memory_analysis()
    row = (mib(4 * size.parameters), mib(memory.output_size_in_bytes), mib(memory.temp_size_in_bytes))
    caption = settings(mesh.devices.flat[0], topology, f"K={stages}", f"{size.parameters:,} parameters, float32")
    show("Initialisation, MiB", ("the whole model", "variables a device", "temporaries a device"), [row], caption)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    known = ["demo", "transformer-l", "amoebanet-d", "init"]
    parser.add_argument("what", nargs="*", default=known, help=f"of {known} (default: all)")
    parser.add_argument("--layers", type=int, nargs="+", default=[103], help="of Transformer-L (default %(default)s)")
    parser.add_argument("--remat", default="layer", help="of Transformer-L (default %(default)s)")
    parser.add_argument("--ends", default="own", help="of Transformer-L (default %(default)s)")
    parser.add_argument("--vocab", type=int, default=32000, help="of Transformer-L (default %(default)s)")
    parser.add_argument("--init-layers", type=int, default=160, help="of the model initialised (default %(default)s)")
    options = parser.parse_args()
    on_cpu()
    for what in options.what:
        console.rule(what)
        if what == "demo":
            demo("v5e:2x2")
        elif what == "transformer-l":
            modes = {"remat": options.remat, "ends": options.ends}
            transformer_l("v3:2x2", options.layers, options.vocab, **modes)
        elif what == "amoebanet-d":
            amoebanet_d("v3:2x2", 4)
        else:
            init("v3:2x2", options.init_layers)


if __name__ == "__main__":
    main()
