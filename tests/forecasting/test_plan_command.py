"""`jpipe plan`: what it prints, and what it says of wrong arguments."""

import sys

import pytest

from jpipe import command

MODEL = """
import flax.linen as nn, jax, jax.numpy as jnp, optax

def model(size):
    batch = {"inputs": jax.ShapeDtypeStruct((size, 8), "float32")}
    return [nn.Dense(8) for _ in range(2)], lambda y, _: jnp.mean(y**2), batch, optax.sgd(0.1)

def of_nothing():
    return (*model(3), {"cast": "use"})

def too_few(size):
    return model(size)[:2]

def of_another_size(size):
    return model(size + 1)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my.py"
    path.write_text(MODEL)
    return path


@pytest.mark.parametrize("factory", ["model", "of_nothing"])
def test_the_best_settings_are_printed(factory, file, capsys):
    arguments = [f"{file}:{factory}", "--batch", "8", "--topology", "v5e:1x2", "--stages", "2", "--microbatches", "4"]
    assert command.main(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Plans for v5e:1x2, 14.4 GiB a device")
    for name in ("stage", "M", "schedule", "remat", "ms a step", "bubble", "a device", "parameters", "limit"):
        assert name in text


def test_a_file_may_import_its_neighbours(file, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (file.parent / "next_to_my.py").write_text(MODEL)
    file.write_text("from next_to_my import model\n")
    assert command.main(["plan", f"{file}:model", "--batch", "8", "--topology", "v5e:1x2", "--stages", "2"]) == 0
    assert capsys.readouterr().out.startswith("Plans for")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py:model", "--batch", "8"], "jpipe plan: there is no file nowhere.py"),
        (["my.py", "--batch", "8"], "'my.py' names no function; pass FILE.py:FACTORY"),
        (["my.py:modle", "--batch", "8"], "my.py has no function 'modle'; its functions are model, of_nothing"),
        (
            ["my.py:too_few", "--batch", "8"],
            "my.py:too_few returned tuple; it has to return the tuple (layers,",
        ),
        (["my.py:of_another_size", "--batch", "8"], "returned a batch of [9] examples for --batch 8"),
        (["my.py:model", "--batch", "0"], "--batch 0 is less than 1"),
        (["my.py:model", "--batch", "8", "--topology", "v9:1"], "topology='v9:1' is unknown"),
        (["my.py:model", "--batch", "8", "--topology", "v5e:1x2", "--memory", "1e-9"], "no plan fits in"),
        (["my.py:model", "--batch", "7", "--topology", "v5e:1x2", "--microbatches", "2"], "a batch of 7 can be cut"),
        (["my.py:model"], "the following arguments are required: --batch"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, file, monkeypatch, capsys):
    monkeypatch.chdir(file.parent)
    with pytest.raises(SystemExit) as ended:
        command.main(["plan", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
