"""Reads a model's inputs from a batch, and tells whether `apply` was given a batch or the bare inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import jax

from jpipe.arrays.trees import outline
from jpipe.jaxprs.tracing import trace
from jpipe.layers.base import describe
from jpipe.types import Batch, PyTree, Shapes


def default_inputs(batch: Batch) -> PyTree:
    """The first layer's inputs: `batch["inputs"]`, the first item of a tuple, or a bare array itself."""
    if isinstance(batch, Mapping):
        if "inputs" not in batch:
            raise ValueError(
                f"the batch is a dict with the keys {sorted(map(str, batch))} and no 'inputs'; name what the first "
                "layer takes 'inputs', or pass inputs=lambda batch: ... to jpipe.Pipeline"
            )
        return batch["inputs"]
    if isinstance(batch, tuple | list):
        if not batch:
            raise ValueError("the batch is an empty tuple; its first item is what the first layer takes")
        return batch[0]
    if not jax.tree_util.treedef_is_leaf(jax.tree.structure(batch)):
        raise ValueError(
            f"the batch is a {type(batch).__name__}, in which nothing says what the first layer takes; pass "
            "inputs=lambda batch: batch.... to jpipe.Pipeline"
        )
    return batch


def is_bare(
    batch: Batch, expected: Shapes, inputs: Shapes, read_inputs: Callable[[Batch], PyTree], said: bool | None
) -> bool:
    """Whether `apply` was given the bare inputs rather than a batch that holds them.

    Args:
      batch: the argument of `apply`.
      expected: the batch seen at init, as shapes.
      inputs: the inputs that were read from it, as shapes.
      read_inputs: `batch -> inputs`.
      said: the caller's word; None to tell by the structure, and by the shapes behind the batch dimension.

    Raises:
      ValueError: it is neither, or may be both; the structures or shapes are shown.
    """
    structure, of_inputs = jax.tree.structure(batch), jax.tree.structure(inputs)
    like_batch, like_inputs = structure == jax.tree.structure(expected), structure == of_inputs
    if said and not like_inputs:
        raise ValueError(
            f"bare=True, but the batch is {outline('batch', batch)}, and not the model's inputs, "
            f"{outline('inputs', inputs)}; leave bare out"
        )
    if said is not None:
        return said
    may_be_both = like_batch and like_inputs and read_inputs is not default_inputs
    reads = trace(read_inputs, expected)[0].jaxpr if may_be_both else None
    if reads is not None and reads.outvars != reads.invars:  # the inputs aren't the whole batch
        features = lambda tree: [leaf.shape[1:] for leaf in jax.tree.leaves(tree)]
        fits_batch, fits_inputs = (features(batch) == features(tree) for tree in (expected, inputs))
        if fits_batch == fits_inputs:
            raise ValueError(
                f"{describe(batch)} may be a batch, which had micro-batches of {describe(expected)} at init, or the "
                f"model's inputs, which had {describe(inputs)}; say which: pipe.apply(variables, batch, bare=False), "
                "or pipe.apply(variables, inputs, bare=True)"
            )
        return fits_inputs
    if like_batch or like_inputs:
        return not like_batch
    with suppress(Exception):  # a batch that lacks arrays that only the loss reads
        if jax.tree.structure(jax.eval_shape(read_inputs, batch)) == of_inputs:
            return False
    raise ValueError(
        f"the batch is {outline('batch', batch)}: neither a training batch, {outline('batch', expected)}, nor the bare "
        f"inputs, {outline('inputs', inputs)}"
    )
