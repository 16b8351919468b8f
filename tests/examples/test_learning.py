"""The examples that learn: names into English, digits of which few are seen; and the page of what they learnt."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import names
import pytest
import same_losses
import translate
import translation_study

ROOT = Path(__file__).parents[2]
SMALL = ["--layers", "1", "--hidden", "64", "--heads", "1", "--width", "32", "--stages", "2", "--microbatches", "2"]
SMALL += ["--languages", "fr", "mt", "--tokens", "3000", "--batch", "32", "--tested", "2"]


@pytest.fixture(autouse=True)
def promotion():
    """As users have it: optax's schedules mix types."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def learnt() -> names.Pairs:
    return names.read()[0]


def run(monkeypatch, script, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [script.__name__, *arguments])
    monkeypatch.setattr(script.cluster, "join", lambda *_: None)  # the devices are there
    script.main()


@pytest.mark.slow
def test_it_learns_what_it_is_shown(learnt):
    """Sixteen French names to the letter; a decoder that doesn't see what the encoder read can't tell them apart."""
    options = translate.parse_options([*SMALL, "--lr", "1e-2", "--steps", "100", "--batch", "16"])
    vocabulary = names.Vocabulary.train({"fr": learnt["fr"]}, 500)
    examples = names.Examples.encode(learnt["fr"][::40], vocabulary)
    examples = names.Examples(examples.inputs[:16], examples.targets[:16])
    pipe = translate.make_pipeline(options, vocabulary.size)
    state = pipe.create_state(jax.random.key(0), examples.batch(slice(16)), translate.make_optimizer(options))
    state, losses = translate.train(pipe, state, iter([examples.batch(slice(16))] * options.steps), options)
    assert losses[0] > 6 and losses[-1] < 0.1
    nats, right = translate.scores(pipe, state.variables, {"fr": examples}, vocabulary)["fr"]
    assert nats == pytest.approx(losses[-1], abs=0.05)
    assert right >= 15 / 16


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:layer 5 .Head. alone takes")
def test_a_run_goes_on_and_knows_its_vocabulary(monkeypatch, capsys, tmp_path, learnt):
    folder, picture = tmp_path / "run", tmp_path / "picture.png"
    run(monkeypatch, translate, *SMALL, "--steps", "2", "--run", str(folder))
    first = capsys.readouterr().out
    assert "2/2" in first and "Names held out, into English" in first
    run(monkeypatch, translate, *SMALL, "--steps", "3", "--run", str(folder), "--picture", str(picture))
    assert "3/3" in capsys.readouterr().out
    assert picture.stat().st_size > 10_000

    other = tmp_path / "other.model"
    other.write_bytes(names.Vocabulary.train({"ja": learnt["ja"]}, 3000).model)
    with pytest.raises(SystemExit, match="trained with another vocabulary"):
        run(monkeypatch, translate, *SMALL, "--steps", "3", "--run", str(folder), "--vocabulary", str(other))


@pytest.mark.filterwarnings("ignore:layer 5 .Head. alone takes")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--languages", "fr", "klingon"], r"no names in klingon; there are: .*\bfr\b"),
        (["--vocabulary", "nowhere.model"], "nowhere.model isn't there"),
        (["--tokens", "1000"], "--tokens 1000: .*Vocabulary size is smaller"),
        (["--vocabulary", __file__], "is no vocabulary of sentencepiece's"),
    ],
)
def test_bad_input(monkeypatch, arguments, message):
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, translate, *SMALL, *arguments)


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_shows_what_runs_gave():
    page = (ROOT / "benchmarks" / "results" / "learning.md").read_text()
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    for title, rows in translation_study.tables(translation_study.kept()).items():
        for row in rows:
            assert row in shown, (title, row)


# --- long -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("model", list(same_losses.MODELS))
def test_losses_are_those_of_one_stage_in_float64(model):
    command = [sys.executable, str(ROOT / "benchmarks" / "same_losses.py"), model, "--steps", "10", "--float64"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    apart = re.findall(r"at most (\S+) apart", printed)
    assert len(apart) == 4
    assert float(apart[-1]) < 1e-12, printed
