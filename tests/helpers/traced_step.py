"""`python traced_step.py FOLDER`: `jax.profiler` traces one compiled step into FOLDER, whose program is written beside.

A process of its own: a trace takes in all that its process holds, and in one that runs tests that is a lot.
"""

import sys
from pathlib import Path

import jax
import optax

from wide import make

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    pipe, _, batch = make()
    state = pipe.create_state(jax.random.key(0), batch, optax.sgd(0.1, momentum=0.9))
    step = jax.jit(pipe.train_step).lower(state, batch).compile()
    jax.block_until_ready(step(state, batch))
    with jax.profiler.trace(folder):
        jax.block_until_ready(step(state, batch))
    (folder / "program.txt").write_text(step.as_text())
