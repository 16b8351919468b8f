"""`jpipe.profile`: stages timed with the others idle, slices that add up, and findings."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
import small_pipeline
from jpipe.planning.costs import Cost
from jpipe.tools.measure import SLICES, LayerTimes, StepModel
from jpipe.tools.profile import find, stage_table
from wide import make, stage_times

HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.fixture(scope="module")
def unbalanced():
    return make()


@pytest.fixture(scope="module")
def found(unbalanced):
    pipe, state, batch = unbalanced
    return jpipe.profile(pipe, state, batch, rounds=2)


# --- the profile ---


def test_slices_add_up_to_the_step(found):
    assert tuple(found.slices) == SLICES
    assert sum(found.slices.values()) == pytest.approx(found.step, rel=1e-9)
    assert all(seconds >= 0 for seconds in found.slices.values())


def test_it_is_shown_as_text_html_data_and_picture(found, tmp_path):
    text = str(found)
    for word in ("stage", "of mean", "computation", "weight update", "rounds", "optimizer", "finding"):
        assert word in text, word
    assert all(f"finding: {finding.text}" in " ".join(text.split()) for finding in found.findings)
    assert repr(found).startswith("<Profile of ") and len(repr(found)) < 120
    assert max(map(len, text.splitlines())) <= 120
    html = found._repr_html_()
    assert html.count("<table>") == 2 and "finding" in html
    found.plot(tmp_path / "profile.png")
    assert (tmp_path / "profile.png").stat().st_size > 20_000
    bars, memory = found.plot(tmp_path / "again.png").axes
    assert bars.get_xlim() == (0, found.predicted.makespan) and memory.get_xlabel() == "time (ms)"
    assert bars.get_title(loc="left") == f"{found.schedule.title}; {found.predicted.in_numbers}"


def test_its_page_has_what_was_measured(unbalanced, found, tmp_path):
    page, facts, pipe = found.view(path=tmp_path / "step.html"), found.facts, unbalanced[0]
    assert f'"title": "{pipe!r}"' in page.path.read_text()
    assert facts["unit"] == "ms" and facts["forward"] == pytest.approx([1e3 * time for time in found.stages.forward])
    total = np.add(facts["forward"], facts["backward"])
    assert total == pytest.approx([1e3 * time for time in found.stages.total])
    assert (facts["parameters"]["room"], facts["optimizer"]) == (found.memory["parameters"], found.memory["optimizer"])


def test_a_trace_names_ticks_slots_actions_layers_and_the_update(tmp_path):
    """What `jax.profiler` saw run are operations of the compiled step, each with the scopes that it comes from."""
    subprocess.run([sys.executable, HELPERS / "traced_step.py", tmp_path], check=True)
    (path,) = tmp_path.rglob("*.xplane.pb")
    lines = [line for plane in jax.profiler.ProfileData.from_file(str(path)).planes for line in plane.lines]
    ran = {event.name for line in lines for event in line.events}
    program = (tmp_path / "program.txt").read_text()
    named = dict(re.findall(r'^ *(?:ROOT )?%?([\w.-]+) = .*op_name="([^"]*)"', program, re.MULTILINE))
    scopes = {named[operation] for operation in ran & named.keys()}
    for scope in ("/ticks/while/body/", "/slot0/F/while", "/slot1/B/while", "/F/while/body/Wide.2", "/update/"):
        assert any(scope in name for name in scopes), scope
        assert scope.encode() in path.read_bytes(), "a viewer takes names from the program in the trace"


# --- wrong arguments ---


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda pipe, state, batch: ((state, pipe, batch), {}), TypeError, r"takes a jpipe\.Pipeline"),
        (lambda *given: (given, {"rounds": 0}), ValueError, "rounds=0"),
        (lambda *given: ((*given[:2], jax.tree.map(lambda a: a[:30], given[2])), {}), ValueError, "batch size 30"),
        (lambda *given: ((*given[:2], tuple(given[2].values())), {}), ValueError, "structure"),
        (lambda *given: ((given[0], make(balance=[3, 4])[1], given[2]), {}), ValueError, "laid out by another"),
    ],
)
def test_wrong_arguments_are_told(unbalanced, change, kind, message):
    arguments, options = change(*unbalanced)
    with pytest.raises(kind, match=message):
        jpipe.profile(*arguments, **options)


# --- its tables, from times that are known ---


def test_stages_with_their_layers():
    schedule = jpipe.make_schedule("interleaved", num_stages=2, num_microbatches=4, num_chunks=2)
    cut = jpipe.partition([1.0] * 6, 2, num_chunks=2)
    table = stage_table(schedule, cut, stage_times((1e-3, 2e-3), (2e-3, 4e-3), (0.0, 3e-3)))
    assert table.rows[0][1].count(",") == 1, "two chunks"
    assert [row[2:] for row in table.rows] == [("1", "2", "0", "3", "0.50"), ("2", "4", "3", "9", "1.50")]


# --- findings, from times that are known ------------------------------------------------------------------------------


LAYERS = 8
BATCH = np.ones((16, 4), np.float32)


def planned(**options):
    """A pipeline of eight layers that has seen a batch."""
    layers = [lambda x, i=i: x + i for i in range(LAYERS)]
    options = {"num_microbatches": 4, "remat": "none"} | options
    pipe = small_pipeline.make(layers, lambda outputs, _: jnp.mean(outputs), **options)
    jax.eval_shape(pipe.init, jax.random.key(0), BATCH)
    return pipe


def costs(of_layers, scale=1.0):
    """A third of a layer's time is its forward, the rest its backward."""
    return [Cost(scale * t / 3, 2 * scale * t / 3, 0) for t in of_layers]


def findings_of(pipe, of_layers, *, idle=0.0, update=0.0, contention=1.0, kept=1.0, noise=0.0):
    """Findings where layers take these times in stages as alone.

    Args:
      pipe: a pipeline.
      of_layers: forward and backward of each layer, `[N]`.
      idle: a step without actions.
      update: the optimiser's update.
      contention: how many times as long stages take together.
      kept: what layers take without recomputation, of what they take.
      noise: by how much rounds differ.
    """
    schedule, total = pipe.schedule, np.zeros(pipe.schedule.num_stages)
    for virtual_stage, (start, stop) in enumerate(pipe.partition.bounds):
        total[schedule.placement.stage_of(virtual_stage)] += sum(of_layers[start:stop])
    stages = stage_times(total / 3, 2 * total / 3, 0 * total)
    step = contention * stages.timeline(schedule).makespan + idle + update
    model = StepModel(schedule, stages, idle=idle, update=update, measured=step, noise=noise)
    times = LayerTimes(pipe.planner, costs(of_layers), costs(of_layers, kept))
    return find(model, times)


def with_change(found):
    return [finding for finding in found if finding.change]


@pytest.mark.parametrize(
    ("options", "better", "promise"),
    [
        ({"balance": [2, 6], "schedule": "gpipe"}, [4, 4], (2 * 3 * 20 + 18) / (2 * 3 * 26 + 18)),
        ({"balance": [2, 6]}, [4, 4], (2 * 3 * 20 + 18) / (2 * 3 * 26 + 18)),
        ({"balance": [1, 3, 1, 3], "num_chunks": 2, "schedule": "interleaved"}, [2, 2, 2, 2], None),
    ],
    ids=str,
)
def test_layers_to_move(options, better, promise):
    """Two stages of 2 and 6 equal layers, M=4: 2 + 6 + 3 * 6 layers' time becomes 4 + 4 + 3 * 4."""
    (found,) = with_change(findings_of(planned(**options), [3.0] * LAYERS, idle=6.0, update=12.0, contention=2.0))
    assert found.change == {"balance": better}
    assert promise is None or found.promise == pytest.approx(promise)
    cuts = f"balance={better} instead of {options['balance']}, step -"
    assert found.text.startswith(f"stage 1 takes 1.50 times the mean of the stages: {cuts}")


def test_a_layer_that_no_cut_makes_lighter():
    found = findings_of(planned(balance=[1, 7]), [30.0, *[1.0] * 7])
    assert with_change(found) == []
    assert any("stage 0 takes 1.62 times" in finding.text and "split its layers" in finding.text for finding in found)


def test_a_bubble_that_is_large():
    """Equal stages: a step of (M + K - 1) / M times the work, here of 5 / 4 and of 4 / 2."""
    assert findings_of(planned(), [1.0] * LAYERS, update=0.5) == ()
    (found,) = findings_of(planned(num_stages=3, balance=[2, 4, 2]), [1.0, 1.0, *[0.5] * 4, 1.0, 1.0])
    assert found.text == (
        "the bubble takes 33% of the step, with M=4: more micro-batches leave less, and jpipe.plan predicts what a "
        "step takes with them"
    )
    assert found.change == {} and found.promise is None


def test_stages_that_are_even_enough():
    """4 and 4.52 seconds, 1.06 times the mean: a step of 8.52 + 3 * 4.52, and 5 * 4.26 if they were equal, 3.5 % less.

    It said to split a layer.
    """
    assert findings_of(planned(), [1.0] * 4 + [1.13] * 4) == ()
    (found,) = findings_of(planned(balance=[3, 5]), [1.0] * LAYERS)  # 3 and 5: 8 + 3 * 5 turns to 8 + 3 * 4
    assert found.text == (
        "stage 1 takes 1.25 times the mean of the stages: balance=[4, 4] instead of [3, 5], step -13 %"
    )
    assert findings_of(planned(balance=[3, 5]), [1.0] * LAYERS, noise=0.14) == ()


def test_recomputation_that_memory_buys_off():
    (found,) = with_change(findings_of(planned(remat="layer"), [1.0] * LAYERS, kept=0.75))
    assert found.change == {"remat": "none"} and found.promise == pytest.approx(0.75)
    assert 'remat="none"): step -25 %' in found.text


def test_too_little_work_promises_nothing():
    found = findings_of(planned(balance=[2, 6]), [1.0] * LAYERS, idle=20.0, update=20.0, contention=9.0)
    assert with_change(found) == []
    assert [finding.text for finding in found] == [
        "stages alone work for 9% of the step, which is less than what is around their work takes: too little to "
        "promise anything; use a larger batch or model"
    ]


# --- changes that a pipeline takes ---


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": jpipe.make_schedule("gpipe", num_stages=2, num_microbatches=4)},
        {"schedule": "interleaved", "num_chunks": 2, "balance": [1, 3, 1, 3]},
        {"balance": [1.0] * 6 + [3.0] * 2},
        {"remat": "layer", "balance": "size"},
    ],
    ids=str,
)
def test_a_pipeline_takes_all_changes_besides_its_other_arguments(options):
    found = with_change(findings_of(planned(**{"balance": [2, 6]} | options), [1.0] * LAYERS, kept=0.5))
    assert found
    for finding in found:
        planned(**options | finding.change)
