"""Makes the index of files in ARCHITECTURE.md from the modules' docstrings; run as a script, it rewrites the index."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "ARCHITECTURE.md"
BEGIN = "<!-- The index is made of first docstring lines: `python tests/helpers/file_index.py` rewrites it. -->\n"
END = "<!-- The index ends. -->\n"


def first_line(path: Path) -> str:
    """The first line of a module's docstring; empty if it has none."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def index() -> str:
    """A paragraph for each folder of the package, and in it a line for each file."""
    parts = []
    for folder in (ROOT / "jpipe", *sorted((ROOT / "jpipe").glob("*/"))):
        if (folder / "__init__.py").exists():
            files = sorted(path for path in folder.glob("*.py") if path.stem != "__init__")
            lines = [f"- `{path.stem}`: {first_line(path)}" for path in files]
            parts += [f"**`{folder.name}/`** {first_line(folder / '__init__.py')}\n", *lines, ""]
    return "\n".join(parts)


def with_index(text: str) -> str:
    """A page with the index of today between its two markers."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{index()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_index(PAGE.read_text()))
