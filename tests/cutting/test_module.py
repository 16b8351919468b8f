"""The traces of a module: in both modes, with all outputs or those that are read."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.cutting.module import (
    make_whole,
    outputs_read,
    paths_below,
    paths_of,
    piece_names,
    with_zeros,
    without_unread,
)
from jpipe.cutting.straight import Part
from jpipe.layers.adapt import as_whole


class Pair(nn.Module):
    """Gives what it computed on its way, too."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        y = nn.Dense(4)(x)
        z = nn.Dense(3)(y)
        return z, {"hidden": y, "wide": nn.Dense(64)(y)}


def test_what_nobody_reads_is_not_computed():
    batch = jax.ShapeDtypeStruct((2, 5), jnp.float32)
    whole = make_whole(as_whole(Pair()), lambda batch: batch, batch)
    assert whole.paths[:2] == [("Dense_0", "bias"), ("Dense_0", "kernel")]
    modes = whole.trace(lambda batch: batch, batch)
    assert [leaf.shape for leaf in jax.tree.leaves(modes.outputs)] == [(2, 3), (2, 4), (2, 64)]
    for read, products in (((True, True, True), 3), ((True, False, False), 2)):
        for traced in (modes.reading(read).training, modes.reading(read).evaluation):
            assert sum(traced.works) == products
            assert len(traced.straight.outputs) == sum(read)


# --- names of pieces --------------------------------------------------------------------------------------------------


PATHS = [
    ("h_0", "attention", "w"),
    ("h_0", "norm", "scale"),
    ("h_1", "attention", "w"),
    ("stack", "mlp", "w"),
    ("h_0", "mlp", "w"),
]


def test_a_piece_is_named_after_its_largest_modules():
    pieces = [[Part(0), Part(1)], [Part(4)], [Part(2)], [Part(3, (4,))], []]
    assert piece_names(pieces, PATHS, [16, 4, 16, 64, 16]) == [
        "h_0/attention",
        "h_0/mlp",
        "h_1/attention",
        "stack/mlp/4",
        "behind stack/mlp/4",
    ]


def test_a_piece_that_has_all_of_a_module_is_named_after_it():
    assert piece_names([[Part(0), Part(1), Part(4)], [Part(2)]], PATHS, [16, 4, 16, 64, 16]) == ["h_0", "h_1/attention"]


def test_a_variable_that_is_in_no_module_gives_its_name():
    assert piece_names([[Part(0)], [Part(1)]], [("table", "w"), ("positions",)], [4, 4]) == ["table", "positions"]


def test_slices_have_their_indices_behind_what_is_stacked():
    paths = [("blocks", "up", "w"), ("blocks", "down", "w")]
    pieces = [[Part(0, (2,)), Part(1, (2,))]]
    assert paths_of(pieces, paths) == [[("blocks", "2", "up", "w"), ("blocks", "2", "down", "w")]]


def test_pieces_whose_names_differ_in_numbers_are_named_alike():
    pieces = [
        [("Dense_0", "w"), ("Norm_0", "s")],
        [("Dense_1", "w"), ("Norm_1", "s")],
        [("Conv_0", "w"), ("Norm_1", "s")],
    ]
    below = paths_below(pieces, [[(4,), (2,)]] * 3)
    assert below[0] == below[1] == pieces[0]
    assert below[2] == pieces[2]


# --- outputs that the loss doesn't read -------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match=r"reads other outputs than it did for the first batch"):
        with_zeros(lambda outputs, batch: outputs["hidden"].sum(), OUTPUTS, BATCH, (False, True))
