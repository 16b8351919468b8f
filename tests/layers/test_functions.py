"""What a function's signature asks for."""

from jpipe.layers.functions import mode_arguments


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
