"""Saves step after step, for `test_faults.py`; all parameters have the value of the step."""

import argparse
import resource
import signal
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpipe


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--full-after", type=int, help="the step after which no file can grow beyond some bytes")
    parser.add_argument("--forget", type=Path, help="another directory: save there at last, and end without waiting")
    options = parser.parse_args()
    batch = {"inputs": np.zeros((4, 256), np.float32)}
    pipe = jpipe.Pipeline([nn.Dense(256)] * 4, lambda y, _: jnp.mean(y), num_stages=2, num_microbatches=2)
    state = pipe.create_state(jax.random.key(0), batch, optax.sgd(0.1))

    def at(step: int) -> jpipe.TrainState:
        params = jax.tree.map(lambda leaf: jnp.full_like(leaf, step), state.variables["params"])
        return state.replace(step=jnp.int32(step), variables={"params": params})

    with jpipe.Checkpointer(options.directory) as saved:
        if options.full_after is None:
            for step in range(1, 10_000):
                saved.save(pipe, at(step))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        saved.save(pipe, at(options.full_after))
        saved.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        try:
            for step in (2, 3):
                saved.save(pipe, at(step))
            saved.wait()
        except RuntimeError as error:
            print(f"RuntimeError: {error}")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for step in (3, 9):  # the one that failed, too
            saved.save(pipe, at(step))
        saved.wait()
        print("again: steps 3 and 9 saved")
    if options.forget:
        print("without with:", file=sys.stderr, flush=True)
        saved = jpipe.Checkpointer(options.forget)
        saved.save(pipe, at(1))


if __name__ == "__main__":
    main()
