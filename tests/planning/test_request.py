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
    ("offload", "options", "words"),
    [
        ("residual", {}, r"offload='residual' is unknown; use some of \['residuals', 'boundaries', 'optimizer'\]"),
        (("residuals", "moments"), {}, "offload='moments' is unknown"),
        ({"residuals": 1.5}, {}, r"offload\['residuals'\]=1.5; use a share from 0 to 1"),
        ({"optimizer": 0.5}, {}, r"offload\['optimizer'\]=0.5; use 0 or 1"),
        ("residuals", {"remat": "full"}, 'remat="stage" or "full" leaves no residuals or boundaries'),
    ],
)
def test_bad_input(offload, options, words):
    with pytest.raises(ValueError, match=words):
        make(**{"remat": "none", **options}, offload=offload)


def test_what_is_neither_a_word_nor_several():
    with pytest.raises(TypeError, match="offload=3 is neither a word nor several"):
        make(offload=3)
    with pytest.raises(TypeError, match="offload=b'residuals' is neither a word nor several"):
        make(offload=b"residuals")
    with pytest.raises(TypeError, match=r"give one dict, as {'residuals': 0.5, 'optimizer': 1}"):
        make(offload=({"residuals": 0.5}, "optimizer"))
    with pytest.raises(TypeError, match="has 3, which is no word"):
        make(offload=["residuals", 3])
    with pytest.raises(TypeError, match=r"offload\['residuals'\]='all' is no number"):
        make(offload={"residuals": "all"})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ends": "half"}, ValueError, r"ends='half' is unknown; use one of \['own', 'spread', 'shared'\]"),
    ],
)
def test_a_wrong_option_is_an_error(options, error, message):
    with pytest.raises(error, match=message):
        make(**options)


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_where_residuals_are_kept_none_are_computed_ahead(remat):
    layer = jpipe.Layer(lambda key, x: {}, lambda w, x: x)
    with pytest.raises(ValueError, match="schedule='ahead' has actions R; use remat="):
        jpipe.Pipeline([layer] * 4, lambda y, _: y, num_stages=2, num_microbatches=4, schedule=ahead(2, 4), remat=remat)
