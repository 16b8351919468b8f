"""The command `jpipe`: what it opens, and what it says when something is in its way."""

import subprocess
import sys
import tempfile
import tomllib
import webbrowser
from importlib.metadata import version
from pathlib import Path

import pytest

from jpipe import __main__ as command
from jpipe.tools import page

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["veiw"], "invalid choice: 'veiw'"),
        (["view", "--save", "no/such/folder/page.html"], "there is no folder no/such/folder; make it first"),
        (["view", "--save", "."], "jpipe view: . is a folder; name a file in it, as pipeline.html"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_what_it_can_do_is_told(capsys):
    found = subprocess.run([sys.executable, "-m", "jpipe", "--version"], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, f"jpipe {version('jpipe')}\n"), found.stderr
    assert command.main([]) == 0
    assert "open a page that shows where a pipeline's time and memory go" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        command.main(["view", "--help"])
    assert ended.value.code == 0 and "--save" in capsys.readouterr().out


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch) -> Path:
    """The folder for temporary files, into which the page is written."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for sizes in ("STAGES", "MICROBATCHES"):  # so that it is made at once
        monkeypatch.setattr(page, sizes, (1, 2))
    return tmp_path


def test_the_browser_opens_the_page(temporary, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    monkeypatch.setenv("DISPLAY", ":0")
    assert command.main(["view"]) == 0
    (path,) = temporary.glob("*.html")
    assert path.read_text() == page.page_of()
    assert opened == [path.as_uri()] and capsys.readouterr().out == ""


@pytest.mark.parametrize("how", ["false", "error"])
def test_without_a_browser_it_says_what_to_do(how, temporary, monkeypatch, capsys):
    def no_browser(_):
        if how == "error":
            raise webbrowser.Error("could not locate runnable browser")
        return False

    monkeypatch.setattr(webbrowser, "open", no_browser)
    monkeypatch.setenv("DISPLAY", ":0")
    assert command.main(["view"]) == 0
    printed = capsys.readouterr().out
    (path,) = temporary.glob("*.html")
    assert f"the page is at {path.as_uri()}" in printed and "jpipe view --save FILE" in printed


def test_the_page_can_be_saved_for_a_site(tmp_path, capsys):
    assert command.main(["view", "--save", str(tmp_path / "pipeline.html")]) == 0
    assert (tmp_path / "pipeline.html").read_text() == page.page_of()
    assert capsys.readouterr().out.startswith(f"wrote {tmp_path / 'pipeline.html'}")


def test_the_command_is_installed_by_this_name():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"jpipe": "jpipe.__main__:main"}
