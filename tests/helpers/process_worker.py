"""One of several processes that are one pipeline, for `test_processes.py`: runs some cases and writes what it found.

What a case returns has to be the same in all processes, and equal to what one process alone finds.
"""

import argparse
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jpipe
from cases import compilations, model, pipeline
from jpipe import checks
from jpipe.processes.runtime import shared_store

Case = Callable[[], Any]
WIDTH = 8
OUT = Path()
"""Where `test_processes.py` and its workers put files."""


def in_order() -> list[Any]:
    return jax.devices()


def mesh_of(shape: dict[str, int], order: str) -> Mesh:
    """A mesh; `order` says which axis goes across processes: the first by `make_mesh` (or "explicit"), or the last."""
    if order in ("first", "explicit"):
        kind = AxisType.Explicit if order == "explicit" else AxisType.Auto
        return jpipe.make_mesh(**shape, devices=in_order(), axis_types=kind)
    devices = np.array(in_order()).reshape(tuple(reversed(shape.values()))).T
    return Mesh(devices, tuple(shape))


def whole(tree: Any) -> Any:
    """All values, in every process."""
    return multihost_utils.process_allgather(tree, tiled=True)


def whole_if_split(leaf: Any) -> Any:
    """An array in every process, as an error proposes for one of which it has only a part."""
    return multihost_utils.process_allgather(leaf, tiled=True) if isinstance(leaf, jax.Array) else leaf


def own_rows(pipe: jpipe.Pipeline, batch: Any) -> Any:
    """The rows of a batch that this process feeds."""
    index, count = pipe.data_shard
    return jax.tree.map(lambda a: a[index * len(a) // count : (index + 1) * len(a) // count], batch)


def step(shape: dict[str, int], order: str = "first", schedule: str = "1f1b", **options: Any) -> Any:
    """Loss, gradients by layer, outputs and evaluation of a batch of which each process feeds its part."""
    truth = model("plain", "float32")
    pipe = pipeline(truth, schedule, shape["stage"], 2, balance="even", mesh=mesh_of(shape, order), **options)
    batch = pipe.place(own_rows(pipe, truth.batch))
    variables = pipe.from_layer_variables(truth.trees, batch)
    (loss, _), grads = pipe.value_and_grad(variables, batch)
    outputs, evaluated = pipe.apply(variables, batch), pipe.evaluate(variables, batch)
    gradients = pipe.layer_variables({"params": grads})
    return {
        "loss": float(loss),
        "gradients": whole(gradients),
        "outputs": whole(outputs),
        "evaluated": float(evaluated),
    }


def training() -> Any:
    """Three steps; the metrics are numbers in each process."""
    truth = model("linen", "float32")
    pipe = pipeline(truth, "1f1b", 2, 2, balance="even", mesh=mesh_of({"stage": 2, "data": 2}, "last"))
    batch = pipe.place(own_rows(pipe, truth.batch))
    with jax.numpy_dtype_promotion("standard"):  # as optax's Adam needs
        state, losses = pipe.create_state(jax.random.key(3), batch, optax.adamw(1e-2)), []
        for _ in range(3):
            state, metrics = pipe.train_step(state, batch)
            batch = pipe.place(own_rows(pipe, truth.batch))  # while the step runs
            losses.append({name: float(value) for name, value in metrics.items()})
    return {"losses": losses, "params": whole(pipe.layer_variables({"params": state.variables["params"]}))}


def own_loop() -> Any:
    """Two steps of a loop of one's own, of which one program is compiled."""
    truth = model("plain", "float32")
    pipe = pipeline(truth, "1f1b", 2, 2, balance="even", mesh=mesh_of({"stage": 2, "data": 2}, "first"))
    batch = pipe.place(own_rows(pipe, truth.batch))

    @jax.jit
    def step(state: tuple, batch: Any) -> tuple[tuple, jax.Array]:
        params, opt_state, number, key = state
        (loss, _), grads = pipe.value_and_grad({"params": params}, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, number + 1, jax.random.split(key)[0]), loss

    with jax.numpy_dtype_promotion("standard"):
        tx, params = optax.adamw(1e-2), pipe.from_layer_variables(truth.trees, batch)["params"]
        state = pipe.place_state((params, tx.init(params), 0, jax.random.key(5)), tx)
        losses = []
        with compilations() as count:
            for _ in range(3):
                state, loss = step(state, batch)
                losses.append(float(loss))
    return {"losses": losses, "compiled": count(), "step": int(state[2])}


def there_and_back() -> Any:
    """Variables of one mesh to another one's by arrays that no process has whole; shared layers among them."""
    table = jpipe.Shared(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)))
    blocks = [lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)]
    layers, x = [table, *blocks, table], np.ones((4, WIDTH), np.float32)

    def make(shape: dict[str, int]) -> jpipe.Pipeline:
        sizes = {"num_stages": shape["stage"], "num_microbatches": 2}
        mesh = mesh_of(shape, "first")
        return jpipe.Pipeline(layers, lambda y, _: y.mean(), **sizes, balance="even", mesh=mesh)

    old, new = make({"stage": 2, "data": 2}), make({"stage": 4})
    items = old.layer_variables(old.init(jax.random.key(1), x))
    split = [not leaf.is_fully_addressable for leaf in jax.tree.leaves(items)]
    found = new.layer_variables(new.from_layer_variables(items, x))
    other = jax.tree.map(lambda a: a * 2, items[-1])
    message = error_of(lambda: new.from_layer_variables([*items[:-1], other]))
    return {"before": whole(items), "after": whole(found), "differ": message, "split": any(split)}


def resumed() -> Any:
    """A run of one process, saved in `OUT`, goes on in several, under another layout, and is saved again."""
    truth, tx = model("linen", "float32"), optax.adamw(1e-2)
    mesh = mesh_of({"stage": 2, "data": 2}, "first")
    pipe = pipeline(truth, "interleaved", 2, 2, 2, balance="even", mesh=mesh)
    with jax.numpy_dtype_promotion("standard"), jpipe.Checkpointer(OUT / "saved") as saved:
        state, position = saved.restore(pipe, pipe.place(own_rows(pipe, truth.batch)), tx)
        losses = []
        for _ in range(2):
            state, metrics = pipe.train_step(state, pipe.place(own_rows(pipe, truth.batch)))
            losses.append(float(metrics["loss"]))
        saved.save(pipe, state, position=position + 2)
    return {"losses": losses, "position": position, "layers": whole(pipe.layer_variables(state.variables))}


def whole_model() -> Any:
    """A model that is one module: it trains, and its checkpoint goes on where it is cut otherwise."""
    model = Chain()
    loss, batch = lambda y, batch: jnp.mean((y - batch["y"]) ** 2), {"inputs": np.eye(4, WIDTH), "y": np.ones((4, 4))}
    batch = jax.tree.map(np.float32, batch)
    mask = lambda params: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)
    losses, tx = [], jpipe.per_layer(optax.adamw(1e-2, weight_decay=0.1, mask=mask))
    with jax.numpy_dtype_promotion("standard"), jpipe.Checkpointer(OUT / "whole") as saved:
        for shape in ({"stage": 2, "data": 2}, {"stage": 4, "data": 1}):
            mesh = mesh_of(shape, "first")
            pipe = jpipe.Pipeline(model, loss, num_stages=shape["stage"], num_microbatches=2, mesh=mesh)
            placed = pipe.place(own_rows(pipe, batch))
            state, _ = saved.restore(pipe, placed, tx)
            state = state or pipe.create_state(jax.random.key(3), placed, tx)
            for _ in range(2):
                state, metrics = pipe.train_step(state, placed)
                losses.append(float(metrics["loss"]))
            saved.save(pipe, state)
    trained = pipe.model_variables(state.variables)
    return {"losses": losses, "trained": whole(trained), "loaded": jpipe.load_model(OUT / "whole")}


class Chain(nn.Module):
    """Four products in a scan, and one behind it."""

    @nn.compact
    def __call__(self, x):
        block = nn.scan(Product, {"params": 0}, split_rngs={"params": True}, length=4)
        return nn.Dense(4)(block(name="blocks")(x)[0])


class Product(nn.Module):
    """A product, as `nn.scan` wants it."""

    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(WIDTH)(x)), None


def error_of(function: Callable[[], Any]) -> str:
    """What a call raises, as text."""
    try:
        function()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def errors() -> Any:
    """Bad input, which each process is told of; afterwards a step runs as if nothing had been."""
    own, truth = jax.process_index(), model("plain", "float32")
    mesh = mesh_of({"stage": 2, "data": 2}, "last")

    def make(microbatches: int = 2, **options: Any) -> jpipe.Pipeline:
        return pipeline(truth, "1f1b", 2, microbatches, **{"balance": "even", "mesh": mesh, **options})

    pipe, found = make(), {}
    start = lambda pipe, batch=truth.batch: pipe.init(jax.random.key(0), batch)
    variables = start(pipe)
    committed = jax.device_put(truth.batch, jax.local_devices()[0])
    found["committed"] = error_of(lambda: pipe.value_and_grad(variables, committed))
    found["placed"] = error_of(lambda: pipe.place(pipe.place(own_rows(pipe, truth.batch))))
    ragged = jax.tree.map(lambda a: a[:3], own_rows(pipe, truth.batch))
    found["rows"] = error_of(lambda: make(4).init(jax.random.key(0), make(4).place(ragged)))
    found["num_microbatches"] = error_of(lambda: start(make(2 + 4 * own)))
    found["balance"] = error_of(lambda: start(make(balance=[3, 4] if own else [4, 3])))
    found["mesh"] = error_of(lambda: start(make(mesh=mesh_of({"stage": 2, "data": 2}, ["first", "last"][own]))))
    found["key"] = error_of(lambda: make().init(jax.random.key(own), truth.batch))
    mine = jax.tree.map(lambda a: a + own if a.dtype == np.int32 else a, truth.batch)
    found["values"] = error_of(lambda: pipe.evaluate(variables, mine))
    found["shapes"] = error_of(lambda: pipe.evaluate(variables, jax.tree.map(lambda a: a[: 4 + 4 * own], truth.batch)))
    found["none"] = error_of(lambda: pipe.evaluate(variables, truth.batch))
    few = make(mesh=Mesh(np.array(in_order())[[0, -1]], ("stage",)))
    over_all = NamedSharding(Mesh(np.array(in_order()), ("all",)), PartitionSpec("all"))
    split = lambda a: jax.make_array_from_callback(a.shape, over_all, lambda i: a[i]) if a.shape[:1] == (WIDTH,) else a
    trees = jax.tree.map(split, truth.trees)
    found["elsewhere"] = error_of(lambda: few.from_layer_variables(trees, truth.batch))
    found["brought"] = error_of(lambda: few.from_layer_variables(jax.tree.map(whole_if_split, trees), truth.batch))
    return found


def late() -> Any:
    """A process that doesn't come is missed within the timeout."""
    checks.SECONDS = 2.0
    if jax.process_index() == 0:
        return error_of(lambda: checks.check_agreement({}, range(jax.process_count())))
    return ""


def one_raises() -> Any:
    """The last process raises, and the others wait for it in a step."""
    if jax.process_index() == jax.process_count() - 1:
        raise ValueError("on purpose")
    return training()


def asleep() -> None:
    time.sleep(300)


def evaluated() -> Callable[[], float]:
    """A step of all processes, which is not compiled yet: the mean of tanh, four times, of ones."""
    x, mesh = np.ones((4, WIDTH), np.float32), mesh_of({"stage": 4}, "first")
    pipe = jpipe.Pipeline([jax.nn.tanh] * 4, lambda y, _: y.mean(), num_stages=4, num_microbatches=2, mesh=mesh)
    variables = pipe.init(jax.random.key(0), x)
    return lambda: float(pipe.evaluate(variables, x))


def hangs(steps: int) -> Any:
    """The last process sleeps after some steps that are watched, and the others wait for it."""
    step = evaluated()
    if steps:
        step()
    with jpipe.watch(seconds=4):
        for index in range(steps + 1):
            if index == steps and jax.process_index() == jax.process_count() - 1:
                asleep()
            step()
    return "no process ended"


def one_compiles() -> Any:
    """The last process compiles for longer than the seconds that no step may take, and the others wait for it."""
    step, seconds = evaluated(), 8 * jax.process_index()
    step()
    with jpipe.watch(seconds=3) as watched:
        watched.steps_of(lambda: time.sleep(seconds))()
        loss = step()
    step()  # all have left the block
    store = shared_store()
    return {"loss": loss, "left": store and store.key_value_dir_get("jpipe/watch/")}


CASES: dict[str, Case] = {
    "stage across": lambda: step({"stage": 4}),
    "stage across, data within": lambda: step({"stage": 2, "data": 2}),
    "stage within, data across": lambda: step({"stage": 2, "data": 2}, "last", schedule="gpipe", remat="none"),
    "both across": lambda: step({"stage": 2, "data": 2}, "explicit"),
    "training": training,
    "own loop": own_loop,
    "there and back": there_and_back,
    "resumed": resumed,
    "errors": errors,
    "late": late,
    "whole model": whole_model,
    "one raises": one_raises,
    "hangs": lambda: hangs(2),
    "hangs at once": lambda: hangs(0),
    "one compiles": one_compiles,
}


def main() -> None:
    global OUT
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("cases", nargs="*")
    options = parser.parse_args()
    OUT = options.out
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    found = {}
    address, waits = f"127.0.0.1:{options.port}", {"timeout": 60, "heartbeat_timeout": 10}
    first = jpipe.initialize(address, options.processes, options.index, **waits)
    assert first == (options.index == 0)
    for name in options.cases:
        begin = time.monotonic()
        found[name] = CASES[name]()
        print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)
    (options.out / f"{options.index}.pickle").write_bytes(pickle.dumps(found))
    jax.distributed.shutdown()
    os._exit(0)  # at once: gloo's threads need no tidying up


if __name__ == "__main__":
    main()
