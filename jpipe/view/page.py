"""`pipe.view()`: puts a pipeline's own numbers into the page, as one HTML file that needs no network."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import webbrowser
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from jpipe.view.facts import PipelineFacts

PAGE = Path(__file__).with_name("page.html")
NO_FACTS = '<script type="application/json" id="own">null</script>'
HEIGHT = 1000
"""Pixels of the frame in a notebook."""


@dataclass(frozen=True)
class Page:
    """A page that was written to a file. Printed it is its address; in a notebook it is the page itself.

    Attributes:
      path: the file.
    """

    path: Path

    @property
    def address(self) -> str:
        """The address that a browser on this machine opens."""
        return self.path.resolve().as_uri()

    def __str__(self) -> str:
        return self.address

    def _repr_html_(self) -> str:
        text = escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{text}" title="jpipe view" width="100%" height="{HEIGHT}" style="border: 0"></iframe>'


def show(facts: PipelineFacts, path: str | os.PathLike[str] | None = None) -> Page:
    """Writes a page with these numbers, and opens it where somebody sits at a terminal with a display.

    It never waits for the browser. At a terminal without one it prints the address; elsewhere, as in a notebook or a
    batch job, it says nothing.

    Args:
      facts: the numbers.
      path: the file; default: a new one in the folder for temporary files.

    Raises:
      ValueError: `path` can't be a file.
    """
    if path is None:
        file, path = tempfile.mkstemp(prefix="jpipe-", suffix=".html")
        os.close(file)
    page = Page(checked(path, "path="))
    data = json.dumps(asdict(facts)).replace("<", "\\u003c")  # which could end the element
    page.path.write_text(PAGE.read_text(encoding="utf-8").replace(NO_FACTS, NO_FACTS.replace("null", data)), "utf-8")
    if sys.stdout.isatty():
        open_page(page, "view(path='pipeline.html')")
    return page


def open_page(page: Page, to_save: str) -> None:
    """Opens a page in a browser, or prints where it is, and the call that saves it elsewhere."""
    if not open_browser(page.address):
        print(f"the page is at {page}; to take it along, give the file a name: {to_save}")


def checked(path: str | os.PathLike[str], argument: str) -> Path:
    """The path of a file that can be written.

    Raises:
      ValueError: it is a folder, or in none.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{argument}{path} is a folder; name a file in it, as {path / 'pipeline.html'}")
    if not path.parent.is_dir():
        raise ValueError(f"{argument}{path}: there is no folder {path.parent}; make it first")
    return path


def open_browser(address: str) -> bool:
    """Opens an address, if there is a display; a browser in a terminal would hold that until it is left."""
    displays = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    if sys.platform not in ("darwin", "win32") and not any(map(os.environ.get, displays)):
        return False
    try:
        return webbrowser.open(address)
    except webbrowser.Error:
        return False
