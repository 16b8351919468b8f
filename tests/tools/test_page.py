"""The page in a real browser: its numbers are `jpipe.simulate`'s, its sliders move, its address keeps the setting."""

import base64
import functools
import itertools
import json
import random
import sys
import tempfile
import webbrowser
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
import published
from cases import ahead, compilations
from jpipe.planning.partition import partition
from jpipe.processes.tables import Table
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.simulate import simulate
from jpipe.schedules.ticks import lower
from jpipe.tools.memory_model import predict_memory
from jpipe.tools.page import (
    CHUNKS,
    LARGEST,
    MICROBATCHES,
    NO_FACTS,
    OFFERED,
    PAGE,
    STAGES,
    facts_of,
    orders_of,
    show,
    write_page,
)
from jpipe.tools.page import Page as Written
from view_chromium import Page, chromium, find

CLOSE = 1e-9


@pytest.fixture(scope="session")
def browser(tmp_path_factory) -> Iterator[Page]:
    with chromium(find()) as page:
        page.home = write_page(tmp_path_factory.mktemp("page") / "page.html").address
        yield page


@pytest.fixture
def tab(browser) -> Iterator[Page]:
    """Wide and light; the test opens the page."""
    browser.problems.clear()
    browser.requests.clear()
    browser.appear(width=1280)
    yield browser
    assert not browser.problems, browser.problems


@pytest.fixture
def page(tab) -> Page:
    """The page as it comes, without a setting in its address."""
    open_at(tab, "")
    return tab


def open_at(page: Page, setting: str) -> None:
    page.open(page.home + setting)


def shown(page: Page, name: str) -> float:
    """The number on a card, in full."""
    return float(page.get(f"document.getElementById('{name}').dataset.value"))


def text(page: Page, name: str) -> str:
    return page.get(f"document.getElementById('{name}').textContent").replace("\N{MULTIPLICATION SIGN}", "x")


def move(page: Page, name: str, value: float | str) -> None:
    """Moves a slider as a pointer does: the value (or its place in a list of values), then the event."""
    page.get(
        f"(() => {{ const e = document.getElementById('{name}'), value = {json.dumps(value)};"
        f"e.value = jpipe.values('{name}')?.indexOf(value) ?? value;"
        "e.dispatchEvent(new Event(e.tagName === 'SELECT' ? 'change' : 'input')); })()"
    )


def type_into(page: Page, name: str, value: str) -> None:
    page.get(f"(() => {{ const e = document.getElementById('{name}-typed'); e.focus(); e.select(); }})()")
    page.write(value)


def address(page: Page) -> str:
    """The address, once the page has written it."""
    page.wait("location.hash === jpipe.address()")
    return page.get("location.hash")


# --- the same numbers -------------------------------------------------------------------------------------------------


def chunks_of(name: str, num_chunks: int) -> int:
    """The chunks of a stage, if the slider has that many."""
    return {"v": 2, "interleaved": num_chunks, "zero_bubble": num_chunks}.get(name, 1)


SHAPES = {
    (name, K, M, chunks_of(name, V))
    for name, K, M, V in itertools.product(OFFERED, STAGES, MICROBATCHES, CHUNKS)
    if K * M * (1 if name == "v" else chunks_of(name, V)) <= LARGEST
}
"""All that the sliders reach: the schedule, K, M and V."""


schedule_of = functools.cache(published.schedule_of)


def random_settings(count: int, *, shapes: int, largest: int, seed: int) -> list[dict[str, Any]]:
    """Settings of that many different schedules, each with times of its own, some equal, some transfers free."""
    rng, names = random.Random(seed), ("schedule", "num_stages", "num_microbatches", "num_chunks")
    drawn = rng.sample(sorted(shape for shape in SHAPES if np.prod(shape[1:]) <= largest), shapes)

    def times(num_stages: int) -> float | list[float]:
        equal = rng.random() < 0.3
        return rng.uniform(0.01, 10) if equal else [rng.uniform(0.01, 10) for _ in range(num_stages)]

    def setting(shape) -> dict[str, Any]:
        transfer = rng.choice([0.0, 1.0, rng.uniform(0, 5)])
        return dict(zip(names, shape, strict=True)) | {
            "forward": times(shape[1]),
            "backward": times(shape[1]),
            "transfer": transfer,
        }

    return [setting(drawn[i % shapes]) for i in range(count)]


def test_settings_have_the_numbers_of_simulate(page):
    """Every number of every setting, relative to the number where that is above 1, and where each action starts."""
    names = ("makespan", "bubble_fraction", "speedup_over_naive", "busy", "peak_in_flight")
    settings = random_settings(480, shapes=120, largest=256, seed=1)
    settings += random_settings(10, shapes=10, largest=2 * LARGEST, seed=2)
    found = page.get(
        f"{json.dumps(settings)}.map((s) => {{ const t = jpipe.simulate(s);"
        f"return [{', '.join(f't.{name}' for name in names)}, t.spans.length, t.spans.reduce("
        "(a, s) => a + s.start * (1 + s.m) * (1 + s.v) * (s.kind === 'F' ? 1 : 2), 0)]; })"
    )
    for setting, numbers in zip(settings, found, strict=True):
        shape = (setting[name] for name in ("schedule", "num_stages", "num_microbatches", "num_chunks"))
        timeline = simulate(schedule_of(*shape), setting["forward"], setting["backward"], setting["transfer"])
        weights = ((s.start, s.action) for s in timeline.spans)
        places = sum(t * (1 + a.microbatch) * (1 + a.chunk) * (1 if a.kind == "F" else 2) for t, a in weights)
        expected = [*(getattr(timeline, name) for name in names), len(timeline.spans), places]
        for mine, theirs in zip(map(np.asarray, expected), map(np.asarray, numbers), strict=True):
            assert mine.shape == theirs.shape, setting
            assert np.max(np.abs(mine - theirs) / np.maximum(1.0, np.abs(mine))) <= CLOSE, (setting, expected, numbers)


def test_cards_show_simulate_and_the_speed_up_over_one_device(page):
    """What sliders say is what `simulate` is called with: slow stages, recomputation and transfers; twice."""
    rng = random.Random(3)
    again = {"none": 0, "layer": 1, "stage": 1, "full": 2}
    for _ in range(25):
        K, V, N = rng.choice([1, 2, 3, 4, 6, 8]), rng.choice(CHUNKS), rng.choice([12, 16, 64, 90])
        M = rng.choice([m for m in MICROBATCHES if N % m == 0 and K * m * V <= LARGEST])
        names, remat = rng.sample(OFFERED, 2), rng.choice(list(again))
        ratio, transfer = rng.randint(1, 50) / 10, rng.randint(0, 60) / 20
        slowness, slow = rng.randint(10, 50) / 10, rng.randrange(K)
        setting = f"#schedule={names[0]}&beside={names[1]}&N={N}&K={K}&M={M}&V={V}&remat={remat}"
        setting += f"&ratio={ratio}&transfer={transfer}&slowness={slowness}&slow={slow}"
        page.get(f"location.hash = {json.dumps(setting)}")
        page.wait(f"jpipe.state().ratio === {ratio} && jpipe.state().transfer === {transfer}")
        forward = [slowness if k == slow else 1.0 for k in range(K)]
        backward = [time * ratio for time in forward]
        one = simulate(schedule_of("naive", 1, M, 1), sum(forward), sum(time * ratio for time in forward)).makespan
        for name, suffix in zip(names, ("", "-beside"), strict=True):
            chunks = chunks_of(name, V)
            recompute = [time * again[remat] for time in forward]
            timeline = simulate(schedule_of(name, K, M, chunks), forward, backward, transfer, recompute=recompute)
            expected = {
                "makespan": timeline.makespan,
                "bubble": timeline.bubble_fraction,
                "speedup-naive": timeline.speedup_over_naive,
                "speedup-one": one / timeline.makespan,
                "in-flight": max(timeline.peak_in_flight) / chunks,
            }
            found = {key: shown(page, key + suffix) for key in expected}
            assert found == pytest.approx(expected, rel=CLOSE, abs=CLOSE), (setting, name)


@pytest.mark.parametrize(
    ("setting", "name", "expected"),
    [
        ("#schedule=1f1b&K=8&M=64", "bubble", "9.9 %"),
        ("#schedule=interleaved&K=4&M=8&V=2", "bubble", "15.8 %"),
        ("#schedule=interleaved&beside=1f1b&K=4&M=8&V=2&transfer=0.5", "bubble-beside", "1f1b: 33.3 %"),
        ("#schedule=1f1b&K=4&M=8&remat=layer", "speedup-one", "2.18 x"),  # 32/11 * (F+B)/(2F+B)
        ("#K=4&M=32", "in-flight-beside", "gpipe: 32"),
        ("#K=4&M=8&schedule=interleaved&V=2", "formula-bubble", "Here 15.8 %."),
        ("#K=4&M=2&schedule=interleaved&V=2", "formula-bubble",
         "They don't hold here, where M=2 is less than K=4: it is 55.6 %."),
        ("#K=4&M=8&transfer=0.5", "formula-bubble", "Here they would give 27.3 %; as it is set above it is 33.3 %."),
        ("#view=memory&K=1&M=1&P=82&E=0&L=24&N=128&A=509.5&R=1&device=8", "total", "7.57 GB"),  # 1.31 + 6.26 (table 1)
        ("#view=memory&K=2&M=8&P=557&E=0&L=24&N=128&A=509.5&R=1&device=8", "fits", "yes"),
        ("#view=memory&K=1&M=1&P=557&E=0&A=0.1&device=8", "fixed", "8.91 GB"),
        ("#view=memory&K=4&M=8&L=40&N=128", "counts", "5120 1280 768 288"),  # of activations: N L, and so on
    ],
)  # fmt: skip
def test_figures_of_the_papers(tab, setting, name, expected):
    """GPipe's formulas (arXiv 1811.06965, section 2.3), interleaved's (arXiv 2104.04473), and 16 bytes a parameter."""
    open_at(tab, setting)
    counts = "[...document.querySelectorAll('#counts td:last-child')].map((c) => c.textContent).join(' ')"
    assert (tab.get(counts) if name == "counts" else text(tab, name)) == expected


def test_every_example_says_what_it_shows(page):
    """All links of both views are settings without a fault."""
    links = page.get("[...document.querySelectorAll('.examples a')].map((a) => a.getAttribute('href'))")
    assert len(links) >= 10
    for link in links:
        open_at(page, link)
        assert not page.get("[...document.querySelectorAll('.wrong:not(dd)')].map((e) => e.textContent).join('')"), link
        assert page.get("document.querySelectorAll('dd[data-value]').length") >= 6


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimiser", "precision", "remat"),
    [
        ("sgd", "float32", "none"),
        ("momentum", "mixed", "layer"),
        ("adam", "bfloat16", "stage"),
        ("adam", "mixed", "full"),
    ],
)
def test_parts_of_the_memory_add_up(tab, optimiser, precision, remat):
    """By the formulas on the page, written a second time, from jpipe's own partition, peaks and tick table."""
    setting = dict(K=4, M=16, V=2, P=5300, E=2, L=50, N=64, A=2097, R=12, device=16)
    words = dict(view="memory", schedule="interleaved", optimiser=optimiser, precision=precision, remat=remat)
    open_at(tab, "#" + "&".join(f"{key}={value}" for key, value in (setting | words).items()))
    width = {"float32": 4, "mixed": 2, "bfloat16": 2}[precision]
    each = {
        "parameters": {"float32": 4, "mixed": 6, "bfloat16": 2}[precision],
        "gradients": 4,
        "optimiser": {"sgd": 0, "momentum": 1}.get(optimiser, 2) * (2 if precision == "bfloat16" else 4),
        "other": 0,
    }
    schedule, n, unit = schedule_of("interleaved", 4, 16, 2), 64 / 16, 2097e3 * width
    chunks = np.reshape(partition([1.0] * 50, 4, num_chunks=2).counts, (2, 4))
    has = 5300e6 * (0.96 / 50 * chunks.sum(axis=0) + [0.02, 0, 0, 0.02])
    room = 5300e6 * (0.96 / 50 * chunks.sum(axis=0).max() + 0.02)
    keeps = remat in ("stage", "full")
    table, rows = lower(schedule, keep_inputs=keeps), 1 if keeps else np.asarray(simulate(schedule).peak_in_flight)
    values = {"none": 12, "layer": 1, "stage": 12, "full": 1}[remat]
    filled = n * unit * (values * chunks.max(axis=0) * rows + (11 if values == 1 else 0))
    waits = lambda name: 1 + np.max([getattr(slot, name).max(axis=0) for slot in table.slots], axis=0)
    own = {part: has * size for part, size in each.items()}
    own |= {"activations": filled, "boundaries": n * unit * (waits("activation") + waits("cotangent"))}
    all_rows = table.rows_written("activation") + table.rows_written("cotangent")
    rooms = {part: room * size for part, size in each.items()}
    rooms |= {"activations": filled.max(), "boundaries": n * unit * all_rows}
    found = tab.get("jpipe.shown()[0].memory")
    assert found["room"] == pytest.approx(rooms, rel=1e-12)
    assert found["total"] == shown(tab, "total") == pytest.approx(sum(rooms.values()), rel=1e-12)
    for k, stage in enumerate(found["stages"]):
        assert stage == pytest.approx({part: sizes[k] for part, sizes in own.items()}, rel=1e-12)


# --- sliders, keys and the address ------------------------------------------------------------------------------------


TIMES = {"schedule": "interleaved", "K": 6, "N": 96, "M": 16, "V": 4, "remat": "none", "ratio": 1.5, "transfer": 0.25}
BYTES = {"P": 2.5, "optimiser": "sgd", "precision": "mixed", "device": 24, "L": 60}


def test_the_address_keeps_what_is_set(page):
    """By events of sliders, or typed; and the numbers are those of the setting."""
    for name, value in (TIMES | {"slowness": 2, "slow": 4}).items():
        move(page, name, value)
    times = [1, 1, 1, 1, 2, 1], [1.5, 1.5, 1.5, 1.5, 3, 1.5]
    expected = simulate(schedule_of("interleaved", 6, 16, 4), *times, transfer=0.25)
    assert shown(page, "makespan") == pytest.approx(expected.makespan, rel=CLOSE)
    page.click("#tab-memory")
    for name, value in BYTES.items():
        move(page, name, value)
    type_into(page, "A", "1234.5")
    kept, state, number = address(page), page.get("jpipe.state()"), shown(page, "total")
    assert state["P"] == 316 and "P=316&" in kept and "A=1234.5&" in kept, "a logarithmic slider, three digits"
    open_at(page, "")
    assert page.get("jpipe.state()") != state
    open_at(page, kept)
    assert (page.get("jpipe.state()"), shown(page, "total")) == (state, number)


@pytest.mark.parametrize("view", ["time", "memory"])
def test_no_slider_reaches_an_impossible_value(tab, view):
    """Every place of every slider, one after the other and at both ends of the others, shows numbers and no fault."""
    open_at(tab, f"#view={view}&schedule=interleaved&slowness=2")
    sliders = tab.get(
        "[...document.querySelectorAll('input[type=range]')].filter((e) => e.offsetParent).map((e) => e.id)"
    )
    assert {"M", "K", "V", "N", "L"} < set(sliders)
    for name in sliders:
        faults = tab.get(f"""(() => {{
          const found = [], slider = document.getElementById("{name}"), others = ["M", "K", "V", "N", "L"];
          const to = (e, place) => {{ e.value = place; e.dispatchEvent(new Event("input")); }};
          for (const end of ["min", "max"]) {{
            document.getElementById("reset").click();
            for (const other of others) to(document.getElementById(other), document.getElementById(other)[end]);
            const places = Number(slider.max) - Number(slider.min);
            for (let i = 0; i <= 4; i++) {{
              to(slider, Number(slider.min) + Math.round(places * i / 4));
              const {{ N, M, K, V, L, slow }} = jpipe.state();
              const numbers = [...document.querySelectorAll("dd[data-value]")].map((e) => e.textContent).join();
              const faults = [...document.querySelectorAll(".wrong:not(dd)")].map((e) => e.textContent).join("");
              if (faults || N % M || K * V > L || slow >= K || /NaN|undefined|Infinity/.test(numbers))
                found.push([end, i, faults, N, M, K, V, L, numbers]);
            }}
          }}
          return found;
        }})()""")
        assert not faults, (name, faults[:2])


# --- impossible values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("K", "5", "K=5 is impossible here; use 1, 2, 3, 4, 6, 8, 16, 32 (stages, one device each)"),
        ("N", "2.5", "N=2.5 must be a whole number from 1 to 4096"),
        ("ratio", "0", "ratio=0 is impossible here; use 0.1 to 5 (times F, without recomputation)"),
    ],
)
def test_what_is_typed_wrong_is_named_at_its_slider(page, name, value, message):
    before = shown(page, "makespan")
    type_into(page, name, value)
    assert text(page, f"{name}-wrong").startswith(message)
    assert page.get(f"document.getElementById('{name}-typed').getAttribute('aria-invalid')") == "true"
    assert shown(page, "makespan") == before
    move(page, name, 2)
    assert text(page, f"{name}-wrong") == ""


@pytest.mark.parametrize(
    ("setting", "name", "message"),
    [
        ("#K=four", "K", "K=four is not a number; use 1, 2, 3, 4, 6, 8, 16, 32; 4 is shown"),
        ("#schedule=toString", "schedule", "schedule=toString is unknown; use one of naive, gpipe, 1f1b, "),
        ("#toString=4", "address", "The address has toString=4, which is no setting; there are view (time, memory), "),
        ("#L=16&K=8&V=3", "V", "V=3 is impossible here; use 1, 2 (chunks of layers a stage, if interleaved or "),
        ("#K=3&slow=3&slowness=2", "slow", "slow=3 is impossible here; use 0 to 2 (which one, from 0); 2 is shown"),
    ],
)
def test_what_is_wrong_in_the_address_is_named(tab, setting, name, message):
    """Beside what is shown instead."""
    open_at(tab, setting)
    assert text(tab, f"{name}-wrong").startswith(message)
    assert tab.get("[...document.querySelectorAll('dd[data-value]')].every((e) => e.textContent)")


# --- how it looks -----------------------------------------------------------------------------------------------------

LOOKS = ["#", "#view=memory&K=32&M=32&device=3", "#K=32&M=16&schedule=interleaved&V=2"]


@pytest.mark.parametrize("setting", LOOKS)
def test_nothing_sticks_out_of_a_narrow_screen(tab, setting):
    tab.appear(width=360, height=740)
    open_at(tab, setting)
    assert tab.get("document.documentElement.scrollWidth") == 360


def test_a_bar_that_is_tapped_on_a_phone_is_named_beside_the_chart(tab):
    """It was named 1,300 pixels further down, where nobody who taps looks."""
    tab.appear(width=390, height=844)
    open_at(tab, "")
    x, y = tab.get("(({ x, y }) => [x, y])(document.getElementById('gantt').getBoundingClientRect())")

    def told(down: float) -> str:
        tab.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x + 64, "y": y + down}])
        tab.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        return text(tab, "pointed")

    assert told(28) == "1f1b, stage 0: forward of micro-batch 0, from 0 F to 1 F."
    assert tab.get("document.getElementById('pointed').getBoundingClientRect().bottom") < 844
    assert told(60).startswith("1f1b, stage 2 waits at 0.")


def test_the_page_asks_for_nothing_but_itself(page):
    open_at(page, "#view=memory")
    assert {request.partition("#")[0] for request in page.requests} <= {page.home, "about:blank", "data:,"}
    assert "://" not in PAGE.read_text()


# --- a pipeline's own numbers -----------------------------------------------------------------------------------------

CELLS = (("0", "Embed, 2 Block"), ("1", "3 <Block>"))
TABLE = Table("Pipeline(6 layers, </script>)", ("stage", "what"), CELLS, ("layers 0, 5 share parameters",))
FACTS: dict[str, Any] = {
    "table": asdict(TABLE),
    "orders": orders_of(schedule_of("1f1b", 2, 4, 1), 24, keeps_inputs=False),
    **{"schedule": "1f1b", "num_stages": 2, "num_microbatches": 4, "num_chunks": 1, "batch": 48},
    **{"remat": "layer", "keeps_inputs": False, "unit": "ms", "times": "Times are measured."},
    **{"forward": (2.0, 3.0), "backward": (5.0, 6.0), "recompute": (1.0, 1.5)},
    "parameters": {"own": [3e9, 5e9], "room": 6e9},
    "other": {"own": [1e6, 2e6], "room": 2e6},
    "residuals": (("residual", (3 * 10**8, 2 * 10**8)), ("residual", (10**6, 5 * 10**6))),
    **{"gradients": 6e9, "optimizer": 2.5e9, "activation": 10**7, "cotangent": 2 * 10**7},
    **{"passing": 3 * 10**6, "work": 4 * 10**8},
}


def own_page(tab: Page, path: Path, schedule: Schedule | None = None, **changes: Any) -> None:
    """Opens the page of a pipeline with these numbers, that of `FACTS` or with another schedule."""
    if schedule:
        orders = orders_of(schedule, 24, keeps_inputs=changes.get("keeps_inputs", False))
        changes |= {"schedule": schedule.name, "orders": orders, **schedule.sizes}
    tab.open(show(FACTS | changes, path / "own.html").address)


def boundaries(schedule: Schedule, **options: bool) -> int:
    """The bytes of what waits between stages, by the tick table and the rows of `FACTS`."""
    rows = lower(schedule, **options).rows_written
    return FACTS["passing"] + FACTS["activation"] * rows("activation") + FACTS["cotangent"] * rows("cotangent")


def test_a_pipelines_page_shows_its_times_and_bytes(tab, tmp_path):
    own_page(tab, tmp_path)
    timeline = simulate(schedule_of("1f1b", 2, 4, 1), [2, 3], [4, 4.5], recompute=[1, 1.5])
    assert shown(tab, "makespan") == pytest.approx(timeline.makespan)
    assert text(tab, "makespan") == f"{timeline.makespan:g} ms"
    assert shown(tab, "speedup-one") == pytest.approx(4 * (5 + 8.5) / timeline.makespan)
    assert text(tab, "title") == FACTS["table"]["title"]
    cells = tab.get("[...document.querySelectorAll('#layers td')].map((c) => c.textContent)")
    assert cells == [cell for row in FACTS["table"]["rows"] for cell in row]
    assert text(tab, "notes") == FACTS["table"]["notes"][0]
    assert not tab.get("document.querySelector('.playground')?.offsetParent"), "nothing of the playground is left"
    tab.click("#tab-memory")
    peaks, table = timeline.peak_in_flight, lower(schedule_of("1f1b", 2, 4, 1))
    assert peaks == (3, 1)
    room = tab.get("jpipe.shown()[0].memory.room")
    assert room == pytest.approx({
        "parameters": 6e9, "gradients": 6e9, "optimiser": 2.5e9, "other": 2e6,
        "activations": 4e8 + 1e8 * max(3 * 3, 2 * 1) + 1e6 * max(1 * 3, 5 * 1),
        "boundaries": 3e6 + 1e7 * table.rows_written("activation") + 2e7 * table.rows_written("cotangent"),
    })  # fmt: skip
    move(tab, "optimiser", "adam")
    assert tab.get("jpipe.shown()[0].memory.room.optimiser") == 2 * 6e9
    assert tab.get("jpipe.shown()[0].memory.stages[1].optimiser") == 2 * 5e9


def test_other_micro_batches_of_a_pipeline_are_as_much_smaller(tab, tmp_path):
    """Times and residuals in proportion to examples; M divides what each of two shards has of a batch of 48."""
    own_page(tab, tmp_path)
    assert tab.get("jpipe.values('M')") == [1, 2, 3, 4, 6, 8, 12, 24]
    move(tab, "M", 12)
    third = lambda times: [time / 3 for time in times]
    timeline = simulate(schedule_of("1f1b", 2, 12, 1), third([2, 3]), third([5, 6]))
    assert shown(tab, "makespan") == pytest.approx(timeline.makespan)
    found = tab.get("jpipe.shown()[0].memory.room.activations")
    assert found == pytest.approx((4e8 + 1e8 * max(3 * 3, 2 * 1) + 1e6 * max(1 * 3, 5 * 1)) / 3)
    assert shown(tab, "in-flight-beside") == 12, "GPipe holds them all"
    assert address(tab) == "#view=time&schedule=1f1b&beside=gpipe&M=12&transfer=0&optimiser=state&device=16"


MINE = [["F0", "F1", "B0", "F2", "B2", "B1"], ["F0", "B0", "F1", "F2", "B2", "B1"]]
KEPT, SPLIT = ("residual",), ("residual", "late_residual", "w_input")
OWN_ORDERS: dict[str, tuple[Schedule, bool, tuple[str, ...]]] = {
    "own, a slot": (Schedule(MINE, slots=("FB",), name="mine"), True, ()),
    "there and back": (schedule_of("v", 2, 8, 2), True, ()),
    "recomputed ahead": (ahead(2, 6), True, KEPT),
    "dualpipe-v": (schedule_of("dualpipe-v", 2, 5), False, SPLIT),
}
"""Schedules, whether stages keep their inputs alone, and the kinds of rows that each have a megabyte of residuals."""


@pytest.mark.parametrize("name", OWN_ORDERS)
def test_a_schedule_of_ones_own_has_the_numbers_of_simulate(tab, tmp_path, name):
    """Of any kind: backwards in two parts too, and each kind of row is as often there as stages hold it."""
    schedule, keeps_inputs, kinds = OWN_ORDERS[name]
    residuals = tuple((kind, (10**6, 10**6)) for kind in kinds)
    own_page(tab, tmp_path, schedule, keeps_inputs=keeps_inputs, **({"residuals": residuals} if kinds else {}))
    if kinds:
        timeline = simulate(schedule, [2, 3], [4, 4.5], recompute=[1, 1.5])
        rows = lower(schedule, keep_inputs=keeps_inputs).rows.values()
        found = tab.get("jpipe.shown()[0].memory.stages.map((stage) => stage.activations)")
        assert found == [FACTS["work"] + 1e6 * sum(each) for each in zip(*rows, strict=True)]
    else:
        move(tab, "transfer", 0.45)
        hop = tab.get("jpipe.state().transfer")
        timeline = simulate(schedule, [2, 3], [5, 6], transfer=hop)
        assert hop > 0
    assert shown(tab, "makespan") == pytest.approx(timeline.makespan)
    assert shown(tab, "bubble") == pytest.approx(timeline.bubble_fraction)
    assert tab.get("jpipe.shown()[0].peak_in_flight") == list(timeline.peak_in_flight)
    if keeps_inputs:
        assert tab.get("jpipe.shown()[0].memory.room.boundaries") == boundaries(schedule, keep_inputs=True)
    assert schedule.name != "mine" or text(tab, "formula-bubble").startswith("They don't hold here")


@pytest.mark.parametrize(("width", "view"), [(1280, "time"), (360, "memory")])
def test_a_pipelines_page_is_whole_in_a_notebook(tab, tmp_path, width, view):
    """There it has no address of its own, and a link or a slider must not lead away."""
    page = show(FACTS, tmp_path / "own.html")
    (tmp_path / "notebook.html").write_text(f"<script>window.jpipe = 1</script>{page._repr_html_()}")
    tab.appear(width=width)
    tab.open((tmp_path / "notebook.html").as_uri())
    frame = "document.querySelector('iframe').contentWindow"
    tab.wait(f"{frame}.jpipe !== undefined")
    tab.get(f"{frame}.document.getElementById('tab-{view}').click()")
    tab.get(f"{frame}.document.getElementById('reset').click()")
    found = tab.get(f"[{frame}.document.documentElement.scrollWidth - {frame}.innerWidth, {frame}.jpipe.state().view]")
    assert found == [0, view]
    assert tab.get(f"{frame}.jpipe.shown().length") == 2


def test_a_page_is_a_file_and_its_address(tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    page = show(FACTS, tmp_path / "own.html")
    assert page == Written(tmp_path / "own.html") and str(page) == (tmp_path / "own.html").as_uri()
    whole = page.path.read_text()
    head, _, rest = whole.partition('<script type="application/json" id="facts">')
    data, _, tail = rest.partition("</script>")
    assert json.loads(data) == json.loads(json.dumps(FACTS))
    assert f"{head}{NO_FACTS}{tail}" == PAGE.read_text()
    assert (opened, capsys.readouterr().out) == ([], ""), "nobody sits at a terminal"
    temporary = show(FACTS)
    assert temporary.path.parent == Path(tempfile.gettempdir()) and temporary.path.read_text() == whole
    temporary.path.unlink()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    assert opened == [show(FACTS, tmp_path / "own.html").address]
    for wrong, message in ((tmp_path, "is a folder; name a file in it"), (tmp_path / "no" / "a.html", "make it first")):
        with pytest.raises(ValueError, match=message):
            show(FACTS, wrong)


# --- facts ------------------------------------------------------------------------------------------------------------


BATCH = np.ones((8, 16), np.float32)


class Block(nn.Module):
    axes: tuple[str | None, ...] = (None, None)

    @nn.compact
    def __call__(self, x):
        split = nn.with_partitioning(nn.initializers.lecun_normal(), self.axes)
        return nn.BatchNorm(use_running_average=False)(
            nn.Dense(16, dtype=jnp.float32, kernel_init=split, param_dtype=jnp.bfloat16)(x)
        )


def make(axes=(None, None), layers=None, **options) -> jpipe.Pipeline:
    sizes = {"num_stages": 2, "num_microbatches": 4, "balance": [1, 3], "remat": "none"}
    layers = layers or [Block(axes), Block(axes), Block(axes), nn.Dense(8)]
    return jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), **sizes | options)


def test_stages_own_bytes_are_those_of_their_layers():
    pipe = make()
    found = facts_of(pipe.planner, "", BATCH)
    trees = [tree["params"] for tree in pipe.layer_variables(pipe.init(jax.random.key(0), BATCH))]
    own = [sum(leaf.nbytes for leaf in jax.tree.leaves(part)) for part in (trees[:1], trees[1:])]
    assert found["parameters"]["own"] == own
    assert found["activation"] == found["cotangent"] == 2 * 16 * 4, "two examples of 16 float32 values cross"


@pytest.mark.parametrize(("axes", "remat"), [({"stage": 2}, "none"), ({"stage": 2, "fsdp": 2, "tp": 2}, "stage")])
def test_all_together_is_what_the_model_of_memory_says(make_mesh, axes, remat):
    """As the page adds it up: rows as the schedule's ticks need them."""
    names = ("fsdp", "tp") if "tp" in axes else (None, None)
    pipe = make(names, remat=remat, schedule="gpipe", mesh=make_mesh(tuple(axes.values()), tuple(axes)))
    found, table = facts_of(pipe.planner, "", BATCH), pipe.planner.training_step(pipe.planner.for_training(BATCH)).table
    rows = [1, 1] if found["keeps_inputs"] else table.rows["residual"]
    moving = sum(max(np.multiply(row, rows)) for _, row in found["residuals"]) + found["work"] + found["passing"]
    moving += sum(found[name] * table.rows_written(name) for name in ("activation", "cotangent"))
    fixed = found["parameters"]["room"] + found["gradients"] + found["other"]["room"]
    assert fixed + moving == predict_memory(pipe.planner, BATCH, optax.sgd(0.1))[0].total


def test_the_first_batch_counts_unless_another_is_given_and_nothing_is_compiled(tmp_path):
    pipe = make()
    with pytest.raises(ValueError, match=r"this pipeline has seen no batch yet; .*or pass a batch"):
        pipe.view()
    with compilations() as compiled:
        of_shapes = facts_of(pipe.planner, "", jax.ShapeDtypeStruct(BATCH.shape, BATCH.dtype))
        assert facts_of(pipe.planner, "") == of_shapes
        twice = facts_of(pipe.planner, "", np.ones((16, 16), np.float32))
        assert not compiled()
    assert (of_shapes["batch"], twice["batch"], twice["activation"]) == (8, 16, 2 * of_shapes["activation"])
    data = json.dumps(of_shapes | {"table": of_shapes["table"] | {"title": repr(pipe)}})
    assert data in pipe.view(path=tmp_path / "pipe.html").path.read_text()


def test_times_are_the_plans_with_the_mean_forward_as_unit():
    pipe = make(balance=[1.0, 1.0, 1.0, 9.0])
    with pytest.warns(UserWarning, match="layer 3"):
        found = facts_of(pipe.planner, "", BATCH)
    assert (found["forward"], found["backward"]) == ([0.5, 1.5], [1.0, 3.0])


def unpacked(orders: str) -> dict[str, Any]:
    return json.loads(zlib.decompress(base64.b64decode(orders)))


def test_a_schedule_of_ones_own_is_on_the_page_beside_others():
    names = lambda orders: [*dict.fromkeys(key.split()[0] for key in orders)]
    found = unpacked(facts_of(make().planner, "", BATCH)["orders"])
    assert names(found) == ["naive", "gpipe", "1f1b", "zero_bubble"]
    assert [key for key in found if key.startswith("1f1b")] == [f"1f1b 2 {M} 1" for M in (1, 2, 4, 8)]
    actions = [["F0", "B0", "F1", "B1"]] * 2
    for name in ("mine", "1f1b"):
        schedule = jpipe.Schedule(actions, slots=("FB",), name=name)
        found = unpacked(facts_of(make(schedule=schedule, num_microbatches=2).planner, "", BATCH)["orders"])
        assert names(found) == ["own", "naive", "gpipe", "1f1b", "zero_bubble"]
        assert found["own 2 2 1"]["crossings"] == [[[0, 1, False], [1, 0, False]]]


def test_pages_are_small(browser, tmp_path):
    """Of any pipeline below 1 MB, of one's own below 200 kB."""
    assert Path(browser.home.removeprefix("file://")).stat().st_size < 10**6
    schedule = schedule_of("interleaved", 32, 128, 2)
    facts = FACTS | schedule.sizes | {"orders": orders_of(schedule, 128 * 3 * 5 * 7, keeps_inputs=False)}
    assert show(facts, tmp_path / "own.html").path.stat().st_size < 200_000
