"""The command `jpipe view`: what it serves, to whom, and what it says when something is in its way."""

import re
import socket
import subprocess
import sys
import tomllib
import webbrowser
from importlib.metadata import version
from pathlib import Path

import pytest

from jpipe.view import command
from jpipe.view.page import PAGE
from jpipe.view.server import HOST

ROOT = Path(__file__).parents[2]


def test_a_port_in_use_is_named(capsys):
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            command.main(["view", "--port", str(port), "--no-browser"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"jpipe view: port {port} of 127.0.0.1 is in use; choose another with --port, or any with --port 0\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["veiw"], "invalid choice: 'veiw'"),
        (["view", "--port", "many"], "argument --port: invalid int value: 'many'"),
        (["view", "--port", "70000"], "port 70000 does not exist; use 1024 to 65535, or 0 for any that is free"),
        (["view", "--port", "-1"], "port -1 does not exist"),
        (["view", "--save", "no/such/folder/page.html"], "there is no folder no/such/folder; make it first"),
        (["view", "--save", "."], "--save . is a folder; name a file in it, as pipeline.html"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def stop_at_once(monkeypatch) -> None:
    def interrupted(self, *_):
        raise KeyboardInterrupt

    monkeypatch.setattr("socketserver.BaseServer.serve_forever", interrupted)
    monkeypatch.setenv("DISPLAY", ":0")


def test_the_browser_is_sent_to_the_address(monkeypatch, capsys):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    stop_at_once(monkeypatch)
    assert command.main(["view", "--port", "0"]) == 0
    printed = capsys.readouterr().out
    assert len(opened) == 1 and f"jpipe view: {opened[0]} (Ctrl+C stops it)" in printed
    assert "No browser" not in printed
    assert command.main(["view", "--port", "0", "--no-browser"]) == 0
    assert len(opened) == 1


@pytest.mark.parametrize("how", ["false", "error"])
def test_without_a_browser_it_says_what_to_do(how, monkeypatch, capsys):
    def no_browser(_):
        if how == "error":
            raise webbrowser.Error("could not locate runnable browser")
        return False

    monkeypatch.setattr(webbrowser, "open", no_browser)
    stop_at_once(monkeypatch)
    assert command.main(["view", "--port", "0"]) == 0
    printed = capsys.readouterr().out
    assert "No browser could be opened. Open the address in one on this machine" in printed
    assert re.search(r"ssh -L (\d+):127\.0\.0\.1:\1 HOST", printed) and "jpipe view --save FILE" in printed


def test_the_page_can_be_saved_for_a_site(tmp_path, capsys):
    assert command.main(["view", "--save", str(tmp_path / "pipeline.html")]) == 0
    assert (tmp_path / "pipeline.html").read_bytes() == PAGE.read_bytes()
    assert capsys.readouterr().out.startswith(f"wrote {tmp_path / 'pipeline.html'}")


def test_alone_it_says_what_it_can_do(capsys):
    assert command.main([]) == 0
    assert "open a page that shows where a pipeline's time and memory go" in capsys.readouterr().out


def test_it_knows_its_version(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"jpipe {version('jpipe')}\n"


def test_help_names_the_command_and_its_options():
    found = subprocess.run([sys.executable, "-m", "jpipe", "view", "--help"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    for option in ("--port", "--no-browser", "--save"):
        assert option in found.stdout


def test_the_command_is_installed_by_this_name():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"jpipe": "jpipe.view.command:main"}
