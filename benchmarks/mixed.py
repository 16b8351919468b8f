"""Unlike layers in one program: what it costs to run them, and to compile them.

For networks whose layers differ: the work of all stages on one core against the same layers run one after the other in
plain JAX with the same remat; and the time to compile the pipelined step against compiling the forward and the backward
of each distinct layer alone, which is what one program has to hold whatever K is.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Stepper, compiled_step, in_turns, on_cpu, pipeline_stepper, settings, show

import jpipe
from jpipe.layers.adapt import as_layers
from jpipe.layers.base import Context, positional
from jpipe.model.trace import trace_model

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from models import amoebanet, resnet, unet

IMAGE = 32


MODELS: dict[str, Callable[[], tuple[list[Any], Callable, tuple[int, ...]]]] = {  # layers, loss, shape of a label
    "resnet-20": lambda: (resnet.small_resnet(10, (3, 3, 3), 16), resnet.loss_fn, ()),
    "unet": lambda: (unet.unet(10, 3, 16), unet.loss_fn, (IMAGE, IMAGE)),
    "amoebanet-d": lambda: (amoebanet.amoebanet(6, 32, 10, stem="small", dropout=0.0), amoebanet.loss_fn, ()),
}


def step_by_hand(layers: list[Any], loss_fn: Callable, tx: Any, m: int, remat: str) -> Callable:
    """Gradient accumulation over micro-batches, layer after layer."""

    def loss_of(params: list[Any], state: list[Any], part: Any) -> tuple[Any, list[Any]]:
        x, new = part["inputs"], []
        for layer, own, kept in zip(layers, params, state, strict=True):

            def call(own: Any, x: Any, layer: Any = layer, kept: Any = kept) -> Any:
                return layer.apply(own | kept, positional(x), Context(jax.random.key(0), True, part))

            x, changed = (jax.checkpoint(call) if remat == "layer" else call)(own, x)
            new.append(changed)
        loss = loss_fn(x, part)
        return (loss[0] / loss[1] if isinstance(loss, tuple) else loss), new

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, kept, opt_state = state
        parts = jax.tree.map(lambda a: a.reshape(m, -1, *a.shape[1:]), batch)

        def accumulate(carry: Any, part: Any) -> tuple[Any, None]:
            (loss, new), grads = jax.value_and_grad(loss_of, has_aux=True)(params, kept, part)
            return jax.tree.map(jnp.add, carry, (loss, grads, new)), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params, kept))
        found = jax.tree.map(lambda a: a / m, jax.lax.scan(accumulate, zeros, parts)[0])
        loss, grads, kept = found
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), kept, opt_state), loss

    return jax.jit(step, donate_argnums=0)


def split(trees: list[Any]) -> tuple[list[Any], list[Any]]:
    """Parameters and state of each layer, on the device."""
    pick = lambda keep: [
        {name: jax.tree.map(jnp.array, part) for name, part in tree.items() if keep(name)} for tree in trees
    ]
    return pick(lambda name: name == "params"), pick(lambda name: name != "params")


def seconds_of(run: Callable[[], Any]) -> float:
    """Processor seconds of a compilation, caches empty."""
    jax.clear_caches()
    begin = time.process_time()
    run()
    return time.process_time() - begin


def compile_distinct(layers: list[Any], shapes: Any) -> tuple[int, float]:
    """(how many distinct layers, the time to compile the forward and the backward of each alone, with remat)."""
    groups = trace_model(layers, lambda batch: batch["inputs"], shapes).groups
    total = 0.0
    for group in groups:
        params = group.variables.get("params", {})
        state = {name: tree for name, tree in group.variables.items() if name != "params"}

        def forward(params: Any, x: Any, state: Any, batch: Any, layer: Any = group.layer) -> Any:
            context = Context(jax.random.key(0), True, batch)
            return layer.apply({"params": params} | state, positional(x), context)

        def backward(params: Any, x: Any, state: Any, batch: Any, gives: Any, forward: Any = forward) -> Any:
            return jax.vjp(jax.checkpoint(lambda p, x: forward(p, x, state, batch)[0]), params, x)[1](gives)

        own = params, group.takes, state, shapes
        total += seconds_of(lambda forward=forward, own=own: jax.jit(forward).lower(*own).compile())
        own = *own, group.gives
        total += seconds_of(lambda backward=backward, own=own: jax.jit(backward).lower(*own).compile())
    return len(groups), total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), help="(default all)")
    parser.add_argument("--stages", type=int, default=4, help="K (default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="M (default %(default)s)")
    parser.add_argument("--microbatch", type=int, default=4, help="images of a micro-batch (default %(default)s)")
    parser.add_argument("--remat", nargs="+", default=["layer"], choices=("layer", "none"), help="(default layer)")
    parser.add_argument("--repetitions", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--core", type=int, default=0, help="(default %(default)s)")
    options = parser.parse_args()
    on_cpu(options.stages, core=options.core)
    tx, m, work, compiling = optax.adam(1e-4), options.microbatches, [], []
    for name in options.models:
        layers, loss_fn, label = MODELS[name]()
        rng, size = np.random.default_rng(0), m * options.microbatch
        batch = {
            "inputs": rng.normal(size=(size, IMAGE, IMAGE, 3)).astype(np.float32),
            "targets": rng.integers(0, 10, (size, *label)).astype(np.int32),
        }
        for remat in options.remat:
            pipe = jpipe.Pipeline(layers, loss_fn, num_stages=options.stages, num_microbatches=m, remat=remat)
            trees = jax.device_get(pipe.layer_variables(pipe.init(jax.random.key(0), batch)))
            params, kept = split(trees)
            hand = step_by_hand(list(as_layers(layers)), loss_fn, tx, m, remat)
            variants = {
                "by hand": Stepper(hand, (params, kept, tx.init(params)), batch, time.process_time),
                "jpipe": pipeline_stepper(pipe, tx, batch, trees, time.process_time),
            }
            times = in_turns(variants, options.repetitions)
            for who, seconds in times.items():
                work.append((f"{name}, {remat}, {who}", f"{seconds:.3f}", f"{seconds / times['by hand']:.3f}"))
        shapes = {n: jax.ShapeDtypeStruct((options.microbatch, *a.shape[1:]), a.dtype) for n, a in batch.items()}
        count, alone = compile_distinct(list(as_layers(layers)), shapes)
        compiling.append((f"{name}: its {count} distinct layers of {len(layers)}, alone", f"{alone:.1f}", "1.00"))
        for k in (2, options.stages):
            pipe = jpipe.Pipeline(layers, loss_fn, num_stages=k, num_microbatches=m)
            seconds = seconds_of(lambda pipe=pipe, batch=batch: compiled_step(pipe, tx, batch))
            compiling.append((f"{name}: the step, K={k}", f"{seconds:.1f}", f"{seconds / alone:.2f}"))
    caption = settings(
        jax.devices()[0],
        "one core",
        f"K={options.stages}, M={m}, 1f1b",
        f"micro-batch {options.microbatch}x{IMAGE}x{IMAGE}x3",
    )
    show("Work of all stages on one core", ("model, remat, step", "processor seconds", "ratio"), work, caption)
    show("Trace and compile time", ("what", "processor seconds", "ratio"), compiling, caption)


if __name__ == "__main__":
    main()
