"""The calculator of docs/parallelism.md in a real browser."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from view_chromium import Page, chromium, find

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"


@pytest.fixture(scope="module")
def calculator(tmp_path_factory) -> Iterator[Page]:
    path = find()
    source = re.search(r"```\{raw\} html\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    page = tmp_path_factory.mktemp("calculator") / "page.html"
    source = re.sub(r'src="(.*?)"', lambda script: f'src="{(PAGE.parent / script[1]).as_uri()}"', source)
    page.write_text(source + "<script>window.jpipe = {}</script>")
    with chromium(path) as browser:
        browser.open(page.as_uri())
        yield browser


def enter(page: Page, name: str, value: str) -> list[str | bool]:
    """Writes a value, reads what is wrong with it, and puts the old one back."""
    return page.get(
        f"(() => {{ const field = document.querySelector('[name={name}]'), old = field.value, rows = [];"
        f"for (const value of ['{value}', old]) {{ field.value = value;"
        "field.dispatchEvent(new Event('input', {bubbles: true}));"
        "rows.push(document.getElementById('bytes-wrong').textContent, document.getElementById('bytes-sent').hidden); }"
        "return rows; })()"
    )


def test_its_figures_are_those_of_the_page(calculator):
    shown = calculator.get("[...document.querySelectorAll('#bytes-sent tbody tr')].map(r => r.children[1].textContent)")
    assert shown == ["37.10", "27.82", "890.40", "96.77", "72.58", "0.39"]
    for figure in shown:
        assert f"{figure} GB" in PAGE.read_text()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n", "0", "devices n: 0 is impossible; use a whole number from 1. "),
        ("n", "2.5", "devices n: 2.5 is impossible; use a whole number from 1. "),
        ("M", "", "micro-batches M is missing; use a whole number from 1. "),
        ("P", "-3", "parameters, billions: -3 is impossible; use a number above 0. "),
        ("w", "0", "link, GB/s: 0 is impossible; use a number above 0. "),
    ],
)
def test_what_is_impossible_is_named_and_not_computed(calculator, name, value, message):
    """It showed -Infinity GB, and figures of -3 devices."""
    assert enter(calculator, name, value) == [message, True, "", False]
