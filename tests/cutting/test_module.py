"""The traces of a module: in both modes, with all outputs or those that are read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.cutting.module import outputs_read, paths_below, paths_of, piece_names, with_zeros, without_unread
from jpipe.cutting.straight import Part

# --- names of pieces --------------------------------------------------------------------------------------------------


PATHS = [
    ("h_0", "attention", "w"),
    ("h_0", "norm", "scale"),
    ("h_1", "attention", "w"),
    ("stack", "mlp", "w"),
    ("h_0", "mlp", "w"),
]


SIZES = [16, 4, 16, 64, 16]


@pytest.mark.parametrize(
    ("pieces", "paths", "names"),
    [
        # A piece is named after its largest modules; one that has all of a module, after that.
        (
            [[Part(0), Part(1)], [Part(4)], [Part(2)], [Part(3, (4,))], []],
            PATHS,
            ["h_0/attention", "h_0/mlp", "h_1/attention", "stack/mlp/4", "behind stack/mlp/4"],
        ),
        ([[Part(0), Part(1), Part(4)], [Part(2)]], PATHS, ["h_0", "h_1/attention"]),
        # A variable that is in no module gives its own name.
        ([[Part(0)], [Part(1)]], [("table", "w"), ("positions",)], ["table", "positions"]),
    ],
)
def test_names_of_pieces(pieces, paths, names):
    assert piece_names(pieces, paths, SIZES[: len(paths)]) == names


def test_paths_of_pieces():
    """Slices have their indices behind what is stacked; names that differ in numbers alone become one."""
    paths = [("blocks", "up", "w"), ("blocks", "down", "w")]
    stacked = [[Part(0, (2,)), Part(1, (2,))]]
    assert paths_of(stacked, paths) == [[("blocks", "2", "up", "w"), ("blocks", "2", "down", "w")]]
    pieces = [[(f"{kind}_{i}", "w"), (f"Norm_{i}", "s")] for kind, i in (("Dense", 0), ("Dense", 1), ("Conv", 1))]
    below = paths_below(pieces, [[(4,), (2,)]] * 3)
    assert below == [pieces[0], pieces[0], pieces[2]]


# --- outputs that the loss doesn't read -------------------------------------------------------------------------------


OUTPUTS = {"hidden": jax.ShapeDtypeStruct((2, 3), jnp.float32), "logits": jax.ShapeDtypeStruct((2,), jnp.float32)}
BATCH = jax.ShapeDtypeStruct((2,), jnp.float32)


def of_logits(outputs, batch):
    outputs["hidden"].sum()  # which it throws away
    return ((outputs["logits"] - batch) ** 2).mean()


@pytest.mark.parametrize(
    ("loss", "read"),
    [
        (of_logits, (False, True)),
        (lambda outputs, batch: outputs["hidden"].sum(), (True, False)),
        (lambda outputs, batch, key: outputs["hidden" if key is None else "logits"].sum(), (True, True)),
        (None, (True, True)),
        (lambda outputs, batch: jnp.zeros(()), (True, True)),
        (lambda outputs, batch: outputs["none"], (True, True)),
    ],
    ids=["some", "others", "evaluation counts too", "no loss", "none", "fails"],
)
def test_what_a_loss_reads(loss, read):
    assert outputs_read(loss, OUTPUTS, BATCH) == read


def test_the_loss_sees_zeros_for_the_rest():
    assert without_unread(OUTPUTS, (False, True)) == {"hidden": None, "logits": OUTPUTS["logits"]}
    loss = with_zeros(of_logits, OUTPUTS, BATCH, (False, True))
    given = {"hidden": None, "logits": np.ones(2, np.float32)}
    assert loss(given, np.zeros(2, np.float32)) == 1.0
    assert loss.__name__ == "of_logits"


def test_a_loss_that_reads_more_at_other_shapes_is_told():
    with pytest.raises(ValueError, match=r"reads other outputs than it did for the first batch"):
        with_zeros(lambda outputs, batch: outputs["hidden"].sum(), OUTPUTS, BATCH, (False, True))
