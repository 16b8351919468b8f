"""`examples/generate.py` at its smallest."""

import re
import sys

import generate
import jax
import pytest

SIZES = "--stages 2 --microbatches 2 --layers 2 --width 16 --heads 2 --seq 24 --batch 8 --steps 10 --every 5 --length 4"


def run(monkeypatch, *more):
    monkeypatch.setattr(sys, "argv", ["generate.py", *SIZES.split(), *more])
    monkeypatch.setattr(generate.cluster, "join", lambda *_: None)  # the devices are there
    with jax.numpy_dtype_promotion("standard"):  # schedules of optax mix dtypes
        generate.main()


@pytest.mark.slow
def test_it_trains_is_evaluated_and_goes_on(monkeypatch, capsys):
    run(monkeypatch)
    printed = capsys.readouterr().out
    assert re.findall(r"step +(\d+): \S+ nats a byte, \S+% guessed right", printed) == ["5", "10"]
    assert [row.split("│")[-2].strip() for row in printed.splitlines() if row.startswith("│")] == ["100.0%"] * 2
    assert printed.count("The statement ") == printed.count("If the object ") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length", "24"], "--length 24 is to be at least 1 and less than --seq 24"),
        (["--prompt", "a", "bc"], "prompts of one length are wanted"),
        (["--prompt", "a" * 24], "--prompt has 24 bytes, and --seq 24 leaves no place for more"),
    ],
)
def test_bad_input(monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit):
        run(monkeypatch, *arguments)
    assert message in capsys.readouterr().err
