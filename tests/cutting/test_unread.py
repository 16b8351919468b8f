"""Outputs that a loss doesn't read are not carried; the loss sees zeros there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.cutting.unread import outputs_read, with_zeros, without_unread

OUTPUTS = {"hidden": jax.ShapeDtypeStruct((2, 3), jnp.float32), "logits": jax.ShapeDtypeStruct((2,), jnp.float32)}
BATCH = jax.ShapeDtypeStruct((2,), jnp.float32)


def of_logits(outputs, batch):
    outputs["hidden"].sum()  # which it throws away
    return ((outputs["logits"] - batch) ** 2).mean()


def test_what_a_loss_reads():
    assert outputs_read(of_logits, OUTPUTS, BATCH) == (False, True)
    assert outputs_read(lambda outputs, batch: outputs["hidden"].sum(), OUTPUTS, BATCH) == (True, False)


def test_what_it_reads_in_evaluation_counts_too():
    def loss(outputs, batch, key):
        return outputs["hidden" if key is None else "logits"].sum()

    assert outputs_read(loss, OUTPUTS, BATCH) == (True, True)


@pytest.mark.parametrize("loss", [None, lambda outputs, batch: jnp.zeros(()), lambda outputs, batch: outputs["none"]])
def test_all_is_read_without_a_loss_or_by_one_that_reads_none_or_fails(loss):
    assert outputs_read(loss, OUTPUTS, BATCH) == (True, True)


def test_the_loss_sees_zeros_for_the_rest():
    assert without_unread(OUTPUTS, (False, True)) == {"hidden": None, "logits": OUTPUTS["logits"]}
    loss = with_zeros(of_logits, OUTPUTS, BATCH, (False, True))
    given = {"hidden": None, "logits": np.ones(2, np.float32)}
    assert loss(given, np.zeros(2, np.float32)) == 1.0
    assert loss.__name__ == "of_logits"


def test_a_loss_that_reads_more_at_other_shapes_is_told():
    with pytest.raises(ValueError, match=r"reads outputs of the model, of a batch of these shapes, that it didn't"):
        with_zeros(lambda outputs, batch: outputs["hidden"].sum(), OUTPUTS, BATCH, (False, True))
