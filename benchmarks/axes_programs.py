"""A row of `axes.py` as a training step in jpipe and in plain JAX."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from axes_models import Row, Sizes, logits, look_up
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jpipe
from jpipe.partitioner.axes import BATCH_AXES, split_by

STAGES, BLOCKS, MICROBATCHES = 2, 2, 4
"""Stages of jpipe; blocks of a stage, as many as plain JAX has; micro-batches of both."""


@dataclass(frozen=True)
class Case:
    """What both programs are made from.

    Attributes:
      row: the row.
      sizes: with what the row says of them.
      mesh: jpipe's, its first axis `stage`.
    """

    row: Row
    sizes: Sizes
    mesh: Mesh

    @classmethod
    def of(cls, row: Row, sizes: Sizes, devices: list[Any]) -> "Case":
        """The row at these sizes, on the first of these devices."""
        devices = devices[: STAGES * row.num_devices]
        return cls(row, row.sizes(sizes), jpipe.make_mesh(stage=STAGES, devices=devices, **row.axes))

    @property
    def plain_mesh(self) -> Mesh:
        """The devices of the first stage."""
        types = (jax.sharding.AxisType.Auto,) * len(self.row.axes)
        return Mesh(self.mesh.devices[0], self.mesh.axis_names[1:], axis_types=types)

    @property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of a batch."""
        shape = (MICROBATCHES * self.sizes.examples * self.row.examples_over, self.sizes.seq)
        if self.row.tied:
            return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("inputs", "targets")}
        return {"inputs": jax.ShapeDtypeStruct((*shape, self.sizes.width), self.sizes.dtype)}


def loss_fn(outputs: Any, batch: Any) -> Any:
    """The cross-entropy of a tied table's logits, or half the mean square."""
    outputs = outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))
    if "targets" in batch:
        return optax.softmax_cross_entropy_with_integer_labels(outputs, batch["targets"]).mean()
    return 0.5 * jnp.mean(outputs * outputs)


# --- jpipe ------------------------------------------------------------------------------------------------------------


def make_pipeline(case: Case, **options: Any) -> jpipe.Pipeline:
    """The row's blocks between two ends, which take the inputs and give the loss, in two stages.

    Args:
      case: the row at its sizes.
      options: of `jpipe.Pipeline`, besides those below or in their place.
    """
    count, row = STAGES * BLOCKS, case.row
    if row.tied:
        table = jpipe.Shared(row.layer(case.sizes))
        layers = [table, *[jnp.tanh] * count, table.using("attend")]
    else:
        layers = [row.end, *[row.layer(case.sizes) for _ in range(count)], jnp.copy]
    chosen = {"balance": [1 + BLOCKS, BLOCKS + 1], "gather": row.gather} | options
    return jpipe.Pipeline(layers, loss_fn, num_stages=STAGES, num_microbatches=MICROBATCHES, mesh=case.mesh, **chosen)


def lower_pipeline(case: Case, **options: Any) -> Any:
    """Loss and gradients, lowered from shapes alone; `options` as for `make_pipeline`."""
    with case.row.within(case.mesh):
        pipe = make_pipeline(case, **options)
        variables = pipe.abstract_state(case.batch, optax.sgd(0.1)).variables
        return jax.jit(pipe.value_and_grad).lower(variables, case.batch)


# --- plain JAX --------------------------------------------------------------------------------------------------------


def plain_shapes(case: Case, blocks: int = BLOCKS) -> dict[str, jax.ShapeDtypeStruct]:
    """Weights with their shardings; those of blocks are stacked, `[blocks, ...]`."""
    found = {}
    for name, (shape, spec) in case.row.specs(case.sizes).items():
        if not case.row.tied:
            shape, spec = (blocks, *shape), P(None, *spec)
        sharding = NamedSharding(case.plain_mesh, spec)
        found[name] = jax.ShapeDtypeStruct(shape, case.sizes.param_dtype, sharding=sharding)
    return found


def plain_batch(case: Case) -> Any:
    """The shapes of a batch, cut into micro-batches `[M, b, ...]`, with their shardings."""
    over = tuple(name for name in case.row.axes if name in BATCH_AXES)
    sharding = NamedSharding(case.plain_mesh, P(None, over or None))
    cut = lambda a: (MICROBATCHES, a.shape[0] // MICROBATCHES, *a.shape[1:])
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(cut(a), a.dtype, sharding=sharding), case.batch)


def plain_loss(case: Case, weights: Any, batch: Any) -> Any:
    """Of one micro-batch: a scan over the blocks, each under `jax.checkpoint`."""
    row, sizes = case.row, case.sizes
    if row.tied:
        enter = jax.checkpoint(lambda w, tokens: look_up(sizes, w, tokens))
        leave = jax.checkpoint(lambda w, x, batch: loss_fn(logits(sizes, w, x), batch))
        x = jax.lax.fori_loop(0, STAGES * BLOCKS, lambda _, x: jnp.tanh(x), enter(weights, batch["inputs"]))
        return leave(weights, x, batch)
    run = jax.checkpoint(lambda x, w: row.block(sizes, w, x), prevent_cse=False)
    return loss_fn(jax.lax.scan(lambda x, w: (run(x, w), None), batch["inputs"], weights)[0], batch)


def plain_step(case: Case) -> Callable:
    """(weights, batch `[M, b, ...]`) -> (loss, gradients): a scan over micro-batches, as one would write it."""
    shapes = plain_shapes(case)

    def step(weights: Any, batch: Any) -> Any:
        used = {name: _gathered(case, weight, shapes[name].sharding) for name, weight in weights.items()}

        def microbatch(sums: Any, part: Any) -> tuple[Any, None]:
            with jax.named_scope("F"):
                loss, vjp = jax.vjp(lambda w: plain_loss(case, w, part), used)
            with jax.named_scope("B"):
                (grads,) = vjp(jnp.ones_like(loss))
            return jax.tree.map(jnp.add, sums, (loss, grads)), None

        wide = jnp.promote_types(case.sizes.param_dtype, jnp.float32)
        zeros = jnp.zeros((), wide), jax.tree.map(jnp.zeros_like, used)
        return jax.tree.map(lambda a: a / MICROBATCHES, jax.lax.scan(microbatch, zeros, batch)[0])

    out = NamedSharding(case.plain_mesh, P()), jax.tree.map(lambda a: a.sharding, shapes)
    return jax.jit(step, out_shardings=out)


def _gathered(case: Case, weight: Any, sharding: NamedSharding) -> Any:
    """A weight gathered over data axes at the start of a step, where jpipe does so too."""
    over = [name for name in case.row.axes if name in BATCH_AXES]
    if case.row.gather != "step" or not over:
        return weight
    return jax.lax.with_sharding_constraint(weight, split_by(sharding.spec, lambda name: name not in over))


def lower_plain(case: Case) -> Any:
    """Loss and gradients, lowered from shapes alone."""
    with jax.set_mesh(case.plain_mesh), case.row.within(case.plain_mesh):
        return plain_step(case).lower(plain_shapes(case), plain_batch(case))


# --- values -----------------------------------------------------------------------------------------------------------


def random_weights(case: Case) -> dict[str, np.ndarray]:
    """Weights for all of jpipe's blocks, `[blocks, ...]`."""
    rng = np.random.default_rng(0)
    shapes = plain_shapes(case, STAGES * BLOCKS)
    return {name: rng.normal(0, 0.1, a.shape).astype(a.dtype) for name, a in sorted(shapes.items())}


def random_batch(case: Case) -> Any:
    rng, sizes = np.random.default_rng(1), case.sizes
    draw = lambda a: rng.integers(0, sizes.vocab, a.shape) if a.dtype == jnp.int32 else rng.normal(size=a.shape)
    return jax.tree.map(lambda a: draw(a).astype(a.dtype), case.batch)
