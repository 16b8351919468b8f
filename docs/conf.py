"""Sphinx: how the documentation is built (`make docs`)."""

import inspect
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jpipe

project = "jpipe"
author = "the jpipe authors"
version = release = jpipe.__version__
html_title = f"jpipe {release}"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nb_execution_mode = "off"  # their stored outputs are shown; the tests run them
nb_merge_streams = True
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["jpipe.css"]
html_extra_path = ["../jpipe/view/page.html"]  # what `jpipe view` opens; the first page shows it in a frame
html_show_copyright = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autoclass_content = "class"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types of JAX, optax and Python have no pages here


def as_restructured_text(app, what, name, obj, options, lines):
    """Marks indented examples and `names` as code, as docstrings write them in the way of Markdown."""
    text = inspect.cleandoc("\n".join(lines)).splitlines()
    lines[:] = []
    for i, line in enumerate(text):
        begins = line.startswith("    ") and i >= 2 and not text[i - 1] and text[i - 2] and text[i - 2][0] != " "
        if begins:
            lines += [".. code-block:: python", ""]
        if what == "property" and i == 0:
            line = line.replace("`: ", "`, ")  # napoleon would take what is before a colon for a type
        lines.append(re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``\\ ", line))


def take_notebooks(app, config):
    """Copies the repository's notebooks to where Sphinx reads, with links as they are from there."""
    folder = Path(__file__).with_name("notebooks")
    folder.mkdir(exist_ok=True)
    wanted = {path.name: path.read_text() for path in (ROOT / "notebooks").glob("*.ipynb")}
    for path in folder.glob("*.ipynb"):
        if path.name not in wanted:
            path.unlink(missing_ok=True)
    for name, text in wanted.items():
        path, text = folder / name, text.replace("](../", "](../../").replace("](../../docs/", "](../")
        if not path.is_file() or path.read_text() != text:  # what hasn't changed isn't built again
            new = folder / f"{name}.{os.getpid()}"  # several builds may run at a time
            new.write_text(text)
            new.replace(path)


def link_notebooks(app, docname, source):
    """Links to the repository's notebooks lead to their pages here."""
    source[0] = re.sub(r"\]\((?:\.\./)+notebooks/", "](/notebooks/", source[0])


def setup(app):
    """Docstrings come before napoleon, which has the priority 500."""
    app.connect("config-inited", take_notebooks)
    app.connect("source-read", link_notebooks)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=400)
