"""The documentation runs: every Python block of a page, in order, as one script, and it prints what is shown below it.

Blocks marked `python` are run, those marked `py` are not: other libraries' code, and the five lines of the first
screen. A `text` block that follows a Python block at once is what that one prints. The how-to pages go on from the
lines that their index begins with, and the first page from the example of the README.
"""

import contextlib
import importlib.util
import io
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jpipe
from jpipe.processes import progress
from jpipe.tools.page import page_of
from view_chromium import chromium, find

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README, START = ROOT / "README.md", DOCS / "start.md"
PAGES = sorted([*DOCS.glob("*.md"), *(DOCS / "howto").glob("*.md")])
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
RUNNING = [page for page in PAGES if BLOCK.search(page.read_text())]
SLOW = {
    *("plan", "slow-step", "packed-sequences", "ahead-of-time", "your-model", "checkpoints", "meshes", "llama-axes"),
    *("remat-and-schedule", "recipes", "fine-tuning", "start", "api", "losses", "numerics", "optimizers"),
    *("out-of-memory", "custom-schedule", "generate", "several-hosts"),
}
"""Run by `make test-notebooks`, with the notebooks."""
HOSTS = {
    **{"huggingface": "transformers", "maxtext": "maxtext", "tunix": "tunix"},
    **{"equinox": "haliax", "keras": "keras", "haiku": "haiku"},
}
"""The pages of other libraries, and the package without which each is skipped; they bring their own imports."""
BY_FLOPS = {"balance", "slow-step", "start", "README"}
"""Their figures follow from FLOPs, and were made with JAX 0.10."""
TRACING = {"slow-step"}
"""Run in a process of their own: JAX's profiler crashes one that has loaded the TPU's compiler without a TPU."""
ALONE = "JPIPE_PAGE_ALONE"
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")


def blocks(page):
    """The line, the code and the expected output (or "") of each Python block."""
    text = page.read_text()
    return [(text.count("\n", 0, found.start(1)), *found.groups("")) for found in BLOCK.finditer(text)]


def run(page, names, *, shown=True):
    for line, code, wanted in blocks(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + code, str(page), "exec"), names)
        if wanted and shown:
            lines = [line.rstrip() for line in printed.getvalue().splitlines()]
            assert same(page, lines, wanted.splitlines()), f"{page}, line {line}: it prints\n{printed.getvalue()}"


def same(page, lines, wanted):
    """Equal; under a JAX that writes elementwise functions otherwise, numbers that follow from FLOPs to 1 %."""
    if lines == wanted or page.stem not in BY_FLOPS or jax.__version__.startswith("0.10."):
        return lines == wanted
    (words, numbers), (same_words, expected) = map(taken_apart, (lines, wanted))
    return words == same_words and numbers == pytest.approx(expected, rel=0.01)


def taken_apart(lines):
    """The words, and the numbers between them."""
    text = "\n".join(lines)
    return NUMBER.sub("#", text).split(), [float(number) for number in NUMBER.findall(text)]


@pytest.fixture
def as_started(monkeypatch):
    """A script's surroundings: the usual dtype promotion, and settings that come too late here are left out."""
    assert jax.device_count() == 8
    update = jax.config.update
    late = "jax_num_cpu_devices"  # eight are simulated already
    monkeypatch.setattr(jax.config, "update", lambda name, value: None if name == late else update(name, value))
    monkeypatch.setattr(jpipe, "initialize", lambda: True)  # backends have started; test_processes.py runs it
    monkeypatch.setattr(progress, "_chosen", None)  # a page that chooses does so for itself
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # a page that sets it sets it for itself
    with jax.numpy_dtype_promotion("standard"):
        yield


def name(page):
    return str(page.relative_to(ROOT))


def marks(page):
    return [*[pytest.mark.slow] * (page.stem in SLOW), *[pytest.mark.filterwarnings("ignore")] * (page.stem in HOSTS)]


@pytest.mark.filterwarnings("ignore:.*look.* at several examples")
@pytest.mark.parametrize("page", [pytest.param(page, marks=marks(page)) for page in RUNNING], ids=name)
def test_a_page_runs_and_prints_what_it_shows(page, as_started, request):
    if page.stem in TRACING and ALONE not in os.environ:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", request.node.nodeid]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {ALONE: "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        return
    if page.stem in HOSTS and importlib.util.find_spec(package := HOSTS[page.stem]) is None:
        pytest.skip(f"{package} isn't installed; the page says what it was run with")
    names = {"__name__": "page"}
    if page == START:
        run(README, names)
    if page.stem not in HOSTS and page.parent.name == "howto" and page.name != "index.md":
        run(DOCS / "howto" / "index.md", names)
    run(page, names)


@pytest.mark.slow
def test_the_settings_of_out_of_memory_take_what_its_table_says(as_started):
    """Each row's first cell is what `takes` of the page is called with."""
    page, names = DOCS / "howto" / "out-of-memory.md", {"__name__": "page"}
    for path in (DOCS / "howto" / "index.md", page):
        run(path, names)
    names["mesh"] = jpipe.make_mesh(stage=4, data=2)
    names["dots"] = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    rows = re.findall(r"^\| `([^`]*)` \| ([\d.]+) \| [\d.]* ?\| ([\d.]+) \|", page.read_text(), re.MULTILINE)
    assert len(rows) >= 14
    for options, *shown in rows:
        assert [f"{number:.1f}" for number in eval(f"takes({options})", names)] == shown, options


@pytest.mark.parametrize("page", [README, *PAGES, *RESULTS, *NOTEBOOKS], ids=name)
def test_links_lead_to_files_and_headings(page):
    text = page.read_text()
    if page in NOTEBOOKS:
        text = "\n".join(
            "".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"
        )
    for target in LINK.findall(re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)):
        if "://" not in target:
            path, _, heading = target.partition("#")
            file = page.parent / path if path else page
            assert file.is_file(), f"{page.name} links to {target}"
            assert not heading or heading in anchors(file.read_text()), f"{page.name} links to {target}"


def anchors(text):
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=name)
def test_tests_and_scripts_that_are_named_are_there(page):
    text = page.read_text()
    for script in set(re.findall(r"\b(?:tests|benchmarks|examples)/[\w/]+\.py\b", text)):
        assert (ROOT / script).is_file(), script
    tests = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    for name in set(re.findall(r"`(test_\w+)`", text)):
        assert f"def {name}(" in tests, name


GIVEN_BY = {
    "TrainState": "create_state",
    "Partition": "partition",
    "Timeline": "simulate",
    "Profile": "profile",
    "Forecast": "forecast",
}
"""Classes that users don't call, and what gives them."""


def code_of(page):
    return "\n".join(code for _, code, _ in blocks(page))


def test_the_page_of_the_api_has_every_public_name_and_all_that_one_calls():
    page = DOCS / "api.md"
    shown = re.findall(r"auto(?:class|function):: (\w+)$", page.read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(jpipe.__all__)
    code = code_of(page)
    assert not [name for name in jpipe.__all__ if name not in GIVEN_BY and f"jpipe.{name}(" not in code]
    assert not [name for name in GIVEN_BY.values() if f"{name}(" not in code]
    for kind in (jpipe.Pipeline, jpipe.Checkpointer, jpipe.Profile, jpipe.Shared, jpipe.Timeline):
        fields, for_tools = set(kind.__annotations__), {"plan", "in_numbers", "bars"}
        for name in {name for name in vars(kind) if name[0] != "_"} - fields - for_tools:
            assert f".{name}" in code, f"{kind.__name__}.{name}"


def test_headline_numbers_are_those_of_the_files_that_they_link_to():
    row = r"^\| \*\*([\d.]+)[^|]*\|[^|]*\| `([\w/.]+)`, \[rows\]\(../([\w/.]+)\) \|$"
    found = re.findall(row, (DOCS / "numbers.md").read_text(), re.MULTILINE)
    assert len(found) == 8
    for figure, script, file in found:
        text = (ROOT / file).read_text()
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]\d)", text), figure
        assert script in text


@pytest.mark.parametrize("name", ["time-model", "memory-model"])
def test_the_models_rows_are_those_of_all_rows(name):
    kept = (ROOT / "benchmarks" / "results" / f"{name.replace('-', '_')}.md").read_text().splitlines()
    assert {line for line in (DOCS / f"{name}.md").read_text().splitlines() if line[:1] == "|"} <= set(kept)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site; a warning fails it.

    JPIPE_SITE names the one of `make docs`, if it has just been made.
    """
    if built := os.environ.get("JPIPE_SITE"):
        return ROOT / built
    pytest.importorskip("sphinx")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(folder)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.slow
def test_the_site_has_the_playground_and_the_notebooks_in_order(site):
    first = (site / "index.html").read_text()
    frame = re.search(r'<iframe[^>]* src="([^"]+)"', first)[1]
    assert (site / frame).read_text() == page_of()
    assert f'<a href="{frame}">' in first
    stored = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert re.findall(r'toctree-l2"><a class="[^"]*" href="notebooks/([^"]+)\.html"', first) == [p.stem for p in stored]
    for path in stored:
        shown = (site / "notebooks" / f"{path.stem}.html").read_text()
        assert shown.count('src="../_images/') == path.read_text().count('"image/png": ')
        assert 'href="../start.html"' in shown


@pytest.mark.slow
def test_no_page_is_wider_than_a_telephone_and_no_table_than_its_page(site):
    """What is wider than a telephone, a table or a line of code, scrolls in a box of its own."""
    too_wide = "[...document.querySelectorAll('.table-wrapper')].filter(e => e.scrollWidth > e.clientWidth).length"
    with chromium(find()) as browser:
        for width, path in itertools.product((390, 1280), sorted(site.rglob("*.html"))):
            browser.appear(width=width)
            browser.call("Page.navigate", url="about:blank")
            browser.call("Page.navigate", url=path.as_uri())
            browser.wait("document.readyState === 'complete'")
            assert browser.get("document.documentElement.scrollWidth") == width, path
            assert width == 390 or browser.get(too_wide) == 0, path
