"""Sphinx: how the documentation is built (`make docs`)."""

import inspect
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jpipe
from jpipe.tools.page import write_page

project = "jpipe"
author = "the jpipe authors"
version = release = jpipe.__version__
html_title = f"jpipe {release}"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nb_execution_mode = "off"  # their stored outputs are shown; the tests run them
nb_merge_streams = True
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["jpipe.css"]
html_show_copyright = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
autoclass_content = "class"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_attr_annotations = False  # the signature has them

TYPES = ("PyTree", "Batch", "Variables", "StageTree", "Item", "LossFn", "Policy", "Leaf", "Device", "AxisTypes")
OTHERS = ("jax.Array", "optax.GradientTransformation", "optax.GradientTransformationExtraArgs")
autodoc_type_aliases = {  # what a signature shows for a word in the code; they are on the page of the API, or below
    **{name: name for name in (*TYPES, "Marked", "Frozen", "Use", *OTHERS)},
    "Mesh": "jax.sharding.Mesh",
    "Axes": "matplotlib.axes.Axes",
    "Figure": "matplotlib.figure.Figure",
}

SITES = {
    "python": "https://docs.python.org/3",
    "jax": "https://docs.jax.dev/en/latest",
    "flax": "https://flax.readthedocs.io/en/latest",
    "flax-linen": "https://flax-linen.readthedocs.io/en/latest",
    "optax": "https://optax.readthedocs.io/en/latest",
    "matplotlib": "https://matplotlib.org/stable",
}
# The pages of the names that occur are listed in small files, so that a build needs no network.
INVENTORIES = Path(__file__).with_name("inventories")
intersphinx_mapping = {name: (site, f"inventories/{name}.txt") for name, site in SITES.items()}
nitpicky = True
nitpick_ignore_regex = [
    ("py:class", r"jpipe\.(execution|memory|planning|schedules|tools)\..*"),  # what tools alone read
    ("py:class", r"(np|numpy)\.ndarray"),  # in the fields of a tuple with names, which Sphinx doesn't look up
    ("py:class", r"jax\.jaxlib\._jax\.Array"),  # `jax.Array` by its own name, inside of a type that has a name
]


LINKED = {
    *re.findall(r"^([\w.]+\.\w+) \w+ ", "\n".join(map(Path.read_text, INVENTORIES.glob("*.txt"))), re.MULTILINE),
    *(f"jpipe.{name}" for name in jpipe.__all__),
}


def as_code(found):
    """A name in backticks, as a link if its page is known."""
    name = found[1]
    page = name if not name.startswith("nnx.") else f"flax.{name}"
    return f":py:obj:`{name} <{page}>`\\ " if page in LINKED else f"``{name}``\\ "


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
        lines.append(re.sub(r"(?<!`)`([^`]+)`(?!`)", as_code, line))


READABLE = {
    r"TypeAliasForwardRef\('([\w.]+)'\)": r"\1",  # an alias within another type
    r"(?<![\w.])PathLike": "~os.PathLike",  # imported for types alone
    "<factory>": "{}",
    r"<function \w+>": "...",
}


def as_readable(app, what, name, obj, options, signature, returned):
    """A signature without what is no Python, which would have no links."""
    for written, readable in READABLE.items():
        signature, returned = (text and re.sub(written, readable, text) for text in (signature, returned))
    return signature, returned


def take_pages(app, config):
    """Copies notebooks and the benchmarks' figures to where Sphinx reads, with their links as seen from there."""
    take(ROOT / "notebooks", "*.ipynb", {"](../": "](../../", "](../../docs/": "](../"})
    take(ROOT / "benchmarks" / "results", "*.md", {"](../../docs/": "](../"})


def take(source, pattern, links):
    """Copies the files of a folder to the folder of the same name here, and removes those that are no longer there."""
    folder = Path(__file__).with_name(source.name)
    folder.mkdir(exist_ok=True)
    wanted = {path.name: path.read_text() for path in source.glob(pattern)}
    for path in folder.glob(pattern):
        if path.name not in wanted:
            path.unlink(missing_ok=True)
    for name, text in wanted.items():
        path = folder / name
        for there, here in links.items():
            text = text.replace(there, here)
        if not path.is_file() or path.read_text() != text:  # what hasn't changed isn't built again
            new = folder / f"{name}.{os.getpid()}"  # several builds may run at a time
            new.write_text(text)
            new.replace(path)


def add_page(app, exception):
    """Writes the page that `jpipe view` opens, which the first page shows in a frame."""
    if exception is None:
        write_page(Path(app.outdir) / "page.html")


def link_pages(app, docname, source):
    """Links to the repository's notebooks and to the benchmarks' figures lead to their pages here."""
    source[0] = re.sub(r"\]\((?:\.\./)+(?:benchmarks/)?(notebooks|results)/", r"](/\1/", source[0])


def setup(app):
    """Docstrings come before napoleon, which has the priority 500."""
    app.connect("config-inited", take_pages)
    app.connect("source-read", link_pages)
    app.connect("build-finished", add_page)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=400)
    app.connect("autodoc-process-signature", as_readable)
