"""What a function's signature asks for."""

from pathlib import Path

import pytest

from jpipe.layers.functions import IN_EVALUATION, IN_TRAINING, mode_arguments

DOCS = Path(__file__).parents[2] / "docs"


def test_mode_arguments():
    both = lambda x, train, deterministic: x
    assert mode_arguments(both, True) == {"train": True, "deterministic": False}
    assert mode_arguments(both, False) == {"train": False, "deterministic": True}
    assert mode_arguments(both, True, lambda name: name == "train") == {"deterministic": False}
    assert mode_arguments(max, True) == {}
    assert mode_arguments(lambda use_running_average, training, is_training: 0, True) == {
        "use_running_average": False,
        "training": True,
        "is_training": True,
    }


def test_the_words_of_public_code_bases():
    maxtext_and_t5x = lambda tokens, *, enable_dropout=True: tokens
    assert mode_arguments(maxtext_and_t5x, True) == {"enable_dropout": True}
    assert mode_arguments(maxtext_and_t5x, False) == {"enable_dropout": False}
    others = lambda x, is_train, apply_dropout, is_eval, eval_mode, inference: x
    on, off = (
        dict.fromkeys(("is_train", "apply_dropout"), True),
        dict.fromkeys(("is_eval", "eval_mode", "inference"), False),
    )
    assert mode_arguments(others, True) == on | off


@pytest.mark.parametrize("page", ["promises.md", "howto/custom-layer.md"])
def test_docs_list_every_name(page):
    text = (DOCS / page).read_text()
    assert [name for name in IN_TRAINING + IN_EVALUATION if f"`{name}`" not in text] == []
