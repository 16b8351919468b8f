"""`examples/dit_stream.py`: a DiT served in stages equals the plain model, and its queue is as the formula says."""

import os
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dit_stream
import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import jpipe
from cases import assert_close

SMALL = "--blocks 4 --width 16 --heads 2 --side 4 --repeats 1"
DEPTHS = (1, 2, 3, 8, 32)


def options_of(text: str) -> Namespace:
    return dit_stream.parse_options(f"{SMALL} {text}".split())


@pytest.fixture
def wide():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # Flax's own layers promote
        yield


def stream_of(stages: int, text: str = "") -> dit_stream.Stream:
    return dit_stream.Stream(stages, options_of(f"--dtype float64 {text}"))


def plain(stream: dit_stream.Stream, pipe: jpipe.Pipeline) -> Callable[[tuple], jax.Array]:
    """The linen modules alone, one after the other."""
    trees = jax.device_get(pipe.layer_variables(stream.variables))

    def run(inputs):
        x = inputs
        for layer, item in zip(stream.layers[:-1], trees[:-1], strict=True):
            x = layer.apply(item, *x)
        return x

    return jax.jit(run)


# --- the stream -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "depth", "images"), [(2, 3, 1), (4, 5, 2)])
def test_outputs_are_those_of_the_plain_model_and_ticks_those_of_the_formula(stages, depth, images, wide):
    stream = stream_of(stages, f"--request {images}")
    stream.queue(1)  # whose variables the pipelines of other depths have too
    pipe, inputs = stream.queue(depth)
    wanted = plain(stream, pipe)(jax.device_get(inputs))
    assert wanted.shape == (depth * images, 4, 4, 4) and float(jnp.std(wanted)) > 1e-3
    found = pipe.apply(stream.variables, inputs)
    jax.effects_barrier()
    assert_close(found, wanted)
    assert len(stream.left) == depth  # the clock is read once a request
    assert loops(jax.make_jaxpr(pipe.apply)(stream.variables, inputs).jaxpr) == {depth + stages - 1}


def loops(jaxpr: Any) -> set[int]:
    """How often the outermost loops of a program turn."""
    found = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            found.add(equation.params["length"])
            continue
        inside = [getattr(value, "jaxpr", value) for value in equation.params.values()]
        found |= {length for inner in inside if hasattr(inner, "eqns") for length in loops(inner)}
    return found


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_equal_stages_are_busy_as_the_formula_says_and_the_slowest_sets_the_pace(stages):
    for depth in DEPTHS:
        found = dit_stream.simulate(depth, [1.0] * stages)
        assert (found.first, found.last) == (stages, depth + stages - 1)
        assert found.busy == pytest.approx(depth / (depth + stages - 1), rel=1e-15)
    slow = dit_stream.simulate(5, [1.0, 3.0, 2.0])
    assert (slow.first, slow.last, slow.busy) == (6, 6 + 4 * 3, pytest.approx(5 * 6 / (3 * 18)))


def costs_of(stages: int) -> list[float]:
    """Of the stages of the example as it is without options, after a check that blocks are shared out equally."""
    stream = dit_stream.Stream(stages, dit_stream.parse_options([]))
    stream.variables = "none: shapes are enough"
    pipe, _ = stream.queue(1)
    blocks = [min(stop, 41) - max(start, 1) for start, stop in pipe.partition.bounds]
    assert blocks == [40 // stages] * stages
    return list(pipe.partition.costs)


@pytest.mark.parametrize("stages", [2, 8])
def test_forty_blocks_are_cut_into_equal_stages(stages):
    """Embedding and output cost little: the simulated busy time is within 0.4 % of that of equal stages."""
    costs = costs_of(stages)
    for depth in DEPTHS:
        found, formula = dit_stream.simulate(depth, costs).busy, depth / (depth + stages - 1)
        assert 0.996 * formula < found <= formula * (1 + 1e-12)


# --- the program ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_prints_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(dit_stream, "console", Console(width=120))  # whatever COLUMNS was when it was imported
    picture = tmp_path / "stream.png"
    options = options_of(f"--stages 2 --depths 1 2 --steps 2 --picture {picture}")
    rows = dit_stream.run(options)
    one, two = (row.measured for row in rows)
    assert one.busy == pytest.approx(1 / 2) and two.busy == pytest.approx(one.last / two.last)
    assert all(0 < point.first <= point.last for point in (one, two))
    unknown = lambda depth: (dit_stream.simulate(depth, [1.0] * 4), dit_stream.UNKNOWN)
    rows += [dit_stream.Row(4, depth, depth, *unknown(depth)) for depth in (1, 2)]
    dit_stream.show(rows, options)
    dit_stream.draw(rows, picture)
    text = capsys.readouterr().out
    assert re.search(r"P=2: outputs equal the plain model's within \de-0\d \(float32\)", text)
    assert re.search(r"2 images by 2 steps of DDIM, P=2, B=2: [\d.]+ s, [\d.]+ images/s", text)
    shown = [re.findall(r"[\d.%-]+", line) for line in text.splitlines() if line.startswith("│")]
    assert [cells[:3] for cells in shown] == [
        ["2", "1", "50.0%"], ["2", "2", "66.7%"], ["4", "1", "25.0%"], ["4", "2", "40.0%"],
    ]  # fmt: skip
    assert [cells.count("-") for cells in shown] == [0, 0, 4, 4]
    assert shown[3][3:] == ["40.0", "-", "0.4", "-", "4000.0", "-", "5000.0", "-"]
    assert picture.stat().st_size > 20_000


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_shows_what_is_simulated():
    """What follows from shapes, and from the measured seconds of one request alone, which can't be had again."""
    page = (Path(__file__).parents[2] / "benchmarks" / "results" / "dit_stream.md").read_text()
    found = [re.findall(r"[\d.]+", line) for line in re.findall(r"^\| \d+ .*$", page, re.MULTILINE)]
    assert [len(cells) for cells in found] == [7] * 6 + [9] * 3
    costs = {stages: costs_of(stages) for stages in (2, 4, 8)}
    for depth, *cells in found[:6]:
        b, wanted = int(depth), []
        for p, of in costs.items():
            wanted += [f"{100 * b / (b + p - 1):.1f}", f"{100 * dit_stream.simulate(b, of).busy:.1f}"]
        assert cells == wanted
    alone = float(found[6][-1])
    for depth, *cells in found[6:]:
        b, numbers = int(depth), list(map(float, cells))
        busy, first, last = dit_stream.simulate(b, [alone * cost / sum(costs[2]) for cost in costs[2]])
        assert numbers[::2] == pytest.approx([100 * busy, 1e3 * b / last, first, last], rel=2e-3)
        measured_busy, speed, _, measured_last = numbers[1::2]
        assert measured_busy == pytest.approx(100 * b * alone / (2 * measured_last), rel=2e-3)
        assert speed == pytest.approx(1e3 * b / measured_last, rel=2e-3)
