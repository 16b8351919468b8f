"""What a user asks for, and what is none of the options."""

import pytest

import jpipe
from cases import ahead
from jpipe.planning.request import Offload, as_offload
from small_pipeline import make


def test_words_and_shares():
    assert as_offload("residuals") == as_offload(["residuals"]) == Offload(residuals=1)
    assert as_offload({"residuals": 0.5, "optimizer": 1}) == Offload(residuals=0.5, optimizer=1)
    assert as_offload(()) == Offload()
    assert as_offload({"optimizer"}) == Offload(optimizer=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offload": "residual"}, r"'residual' is unknown; use some of \['residuals', 'boundaries', 'optimizer'\]"),
        ({"offload": {"residuals": 1.5}}, r"offload\['residuals'\]=1.5; use a share from 0 to 1"),
        ({"offload": {"optimizer": 0.5}}, r"offload\['optimizer'\]=0.5; use 0 or 1"),
        ({"offload": "residuals", "remat": "full"}, 'remat="stage" or "full" leaves no residuals or boundaries'),
        ({"offload": b"residuals"}, "offload=b'residuals' is neither a word nor several"),
        ({"offload": ({"residuals": 0.5}, "optimizer")}, '0.5}" is unknown; .*, or a dict of shares by these'),
        ({"offload": {"residuals": "all"}}, r"offload\['residuals'\]='all' is no number"),
        ({"ends": "half"}, r"ends='half' is unknown; use one of \['own', 'spread', 'shared'\]"),
    ],
)
def test_wrong_options_are_named(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make(**{"remat": "none"} | options)


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_where_residuals_are_kept_none_are_computed_ahead(remat):
    layer = jpipe.Layer(lambda key, x: {}, lambda w, x: x)
    with pytest.raises(ValueError, match="schedule='ahead' has actions R; use remat="):
        jpipe.Pipeline([layer] * 4, lambda y, _: y, num_stages=2, num_microbatches=4, schedule=ahead(2, 4), remat=remat)
