"""Pieces have the names that the model gives to their parameters."""

from jpipe.cutting.names import paths_below, paths_of, piece_names
from jpipe.cutting.straight import Part

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
