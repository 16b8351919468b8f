"""The house: folders import as listed in ARCHITECTURE.md and never back, files without circles, none too long."""

import ast
import io
import re
import tokenize
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import file_index
import jpipe
from jpipe.model import traced_layer

PACKAGE = Path(__file__).parents[2] / "jpipe"
_ALLOWED = {
    "processes": "",
    "schedules": "",
    "jax": "processes",
    "partitioner": "jax",
    "layers": "processes jax",
    "model": "processes jax partitioner layers",
    "memory": "processes schedules jax partitioner layers model",
    "cutting": "processes jax layers model memory",
    "training": "jax partitioner layers model memory",
    "planning": "processes schedules jax partitioner layers model memory cutting",
    "execution": "processes schedules jax partitioner layers model memory cutting planning",
    "checkpoints": "processes jax model memory training cutting pipeline checks",
    "tools": "processes schedules jax partitioner layers model memory training planning execution pipeline checks",
}
MAY_IMPORT = {folder: set(names.split()) for folder, names in _ALLOWED.items()}
"""By folder, the folders that its files import."""
TOOLS = {"tools"}
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """`jpipe.memory.storage` of a file."""
    return ".".join([PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")


def imported_by(tree: ast.AST) -> set[str]:
    """The modules that a file imports, wherever in it, or a part of it."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"a relative import: {ast.unparse(node)}"
            modules.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return modules


def opened_by(tree: ast.Module) -> set[str]:
    """The modules that open a tool: methods import them when they are called, and nothing else but types does."""
    methods = [m for c in tree.body if isinstance(c, ast.ClassDef) for m in c.body if isinstance(m, ast.FunctionDef)]
    of_types = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    rest = [node for node in tree.body if node not in of_types and not isinstance(node, ast.ClassDef)]
    rest += [m for c in tree.body if isinstance(c, ast.ClassDef) for m in c.body if m not in methods]
    return set().union(*map(imported_by, methods)).difference(*map(imported_by, rest))


TREES = {name_of(path): ast.parse(path.read_text()) for path in FILES}
IMPORTS = {name: imported_by(tree) for name, tree in TREES.items()}
OWN = {
    name: {module for module in modules - opened_by(TREES[name]) if module in IMPORTS} - {"jpipe"}
    for name, modules in IMPORTS.items()
}
"""All imports of the package's own modules, but for those by which a method opens a tool, as `schedule.plot()` does."""


def test_continuous_integration_names_tests_that_are_there():
    root = PACKAGE.parent
    for name in re.findall(r"tests/[\w/.:]+", (root / ".ci" / "run").read_text()):
        path, _, test = name.partition("::")
        assert (root / path).exists(), name
        assert not test or f"def {test}(" in (root / path).read_text(), name


def test_every_folder_has_its_line():
    assert {path.parent.name for path in FILES} - {"jpipe"} == set(MAY_IMPORT)


def test_folders_import_only_what_their_lines_allow():
    for folder in MAY_IMPORT:
        for name, modules in OWN.items():
            if name.startswith(f"jpipe.{folder}."):
                found = {module.split(".")[1] for module in modules} - {folder, "types", "users_numbers"}
                assert found <= MAY_IMPORT[folder], f"{name} imports {found - MAY_IMPORT[folder]}"


def test_methods_open_tools_alone():
    opened = {(name, module) for name, tree in TREES.items() for module in opened_by(tree) if module in IMPORTS}
    assert {(name, module) for name, module in opened if module.split(".")[1] not in TOOLS} == set()


def test_schedules_know_no_jax():
    for name, modules in IMPORTS.items():
        if name.startswith("jpipe.schedules."):
            assert not [module for module in modules if module.partition(".")[0] in ("jax", "flax", "optax")], name


def test_flax_is_known_to_the_adapters_and_to_checks_alone():
    known = {name for name, modules in IMPORTS.items() if any(m.partition(".")[0] == "flax" for m in modules)}
    adapters = {f"jpipe.layers.{name}" for name in ("flax", "linen", "nnx", "adapt")}
    assert known == {*adapters, "jpipe.checks", "jpipe.jax.inside"}


def test_no_file_imports_itself_through_others():
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' -> '.join([*path[path.index(name) :], name])}"
        if name not in done:
            for module in OWN[name]:
                visit(module, (*path, name))
            done.add(name)

    for name in OWN:
        visit(name, ())


def too_long(path: Path) -> Iterator[str]:
    """What of a file is too long to be read at one sitting."""
    if len(path.read_text().splitlines()) > 500:
        yield f"{name_of(path)} has more than 500 lines"
    for node in ast.walk(TREES[name_of(path)]):
        if isinstance(node, ast.FunctionDef):
            docstring = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
            body = node.body[docstring:] or node.body
            if node.end_lineno - body[0].lineno >= 50:
                yield f"{name_of(path)}.{node.name} has more than 50 lines"


def test_files_can_be_read_at_one_sitting():
    assert not [fault for path in FILES for fault in too_long(path)]


@pytest.mark.parametrize("remat", ["none", "stage"])
def test_a_batch_reaches_its_layers_in_few_calls(remat):
    """While tracing, from `train_step` to a layer's `apply`: twelve frames of the package at most, none twice."""
    ways: list[list[str]] = []

    class Witness(nn.Module):
        @nn.compact
        def __call__(self, x):
            frames = traceback.extract_stack()
            ways.append([f"{f.filename}:{f.name}" for f in frames if Path(f.filename).is_relative_to(PACKAGE)])
            return nn.Dense(8)(x)

    layers, batch = [Witness() for _ in range(4)], np.ones((4, 8), np.float32)
    pipe = jpipe.Pipeline(
        layers, lambda y, _: jnp.mean(y**2), num_stages=2, num_microbatches=2, balance="even", remat=remat
    )
    state = pipe.create_state(jax.random.key(0), batch, optax.sgd(0.1))
    ways.clear()
    pipe.train_step(state, batch)
    assert ways
    for way in ways:
        assert len(way) <= 12, way
        assert len(set(way)) == len(way), way
        files = [frame.partition(":")[0] for frame in way]
        again = [file for i, file in enumerate(files) if i and files[i - 1] != file and file in files[:i]]
        assert {Path(file).name for file in again} <= {"traced_layer.py"}, "tracing alone calls back"


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_few_calls_lead_to_a_layers_equations(monkeypatch, schedule):
    """While tracing, from `value_and_grad` to a layer's equations: ten functions, but for what makes loops and maps."""
    ways, replayed = list[list[str]](), traced_layer.replayed

    def witness(*arguments):
        frames = [(Path(f.filename), f.name) for f in traceback.extract_stack()[:-1]]
        own = [(path.name, name) for path, name in frames if path.is_relative_to(PACKAGE) and name != "<lambda>"]
        own = [name for file, name in own if file not in ("in_place.py", "axes.py")]
        names = own[len(own) - own[::-1].index("value_and_grad") - 1 :]
        ways.append([name for name in names if name != "_vjp_leaves"])
        return replayed(*arguments)

    monkeypatch.setattr(traced_layer, "replayed", witness)
    layers, batch = [nn.Dense(8) for _ in range(8)], np.ones((4, 8), np.float32)
    pipe = jpipe.Pipeline(
        layers, lambda y, _: jnp.mean(y**2), num_stages=2, num_microbatches=2, schedule=schedule, remat="none"
    )
    jax.eval_shape(pipe.value_and_grad, jax.eval_shape(pipe.init, jax.random.key(0), batch), batch)
    assert {way[-1] for way in ways} >= {"__call__", "backward" if schedule == "1f1b" else "backward_weights"}
    assert max(map(len, ways)) <= 10, ways


def test_the_glossary_points_at_definitions():
    text = (PACKAGE.parent / "ARCHITECTURE.md").read_text().partition("## Words")[2]
    rows = re.findall(r"^\| [a-z, ]+ \|.*\| `(\w+)`, `([a-z_/]+\.py)` \|$", text, re.MULTILINE)
    assert 10 <= len(rows) <= 15
    for name, path in rows:
        found = re.findall(rf"^(?:class {name}\b|{name} =)", (PACKAGE / path).read_text(), re.MULTILINE)
        assert len(found) == 1, f"{name} isn't defined in {path}"


def test_the_index_is_made_of_the_docstrings():
    text = file_index.PAGE.read_text()
    assert text == file_index.with_index(text), "run `python tests/helpers/file_index.py`"


HANGING = re.compile(r"(Of|In|By|What|With|That) ")
"""The beginnings of docstrings that name nothing before what they say of it."""


def hanging(path: Path) -> Iterator[str]:
    """The docstrings of a file whose first lines are no line, or don't say what something is or does."""
    line = file_index.first_line(path)
    if not line or len(line) > 120 or not line.endswith((".", "?")):
        yield f"{name_of(path)} begins with no line of its own: {line}"
    for node in ast.walk(TREES[name_of(path)]):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            begin = (ast.get_docstring(node) or "").partition("\n")[0]
            if HANGING.match(begin):
                yield f"{name_of(path)}.{getattr(node, 'name', '')}: say what it is, or does: {begin}"


def test_docstrings_begin_with_a_verb_or_a_noun():
    assert not [fault for path in FILES for fault in hanging(path)]


# --- one name, one thing ----------------------------------------------------------------------------------------------


def test_no_two_files_have_one_name():
    stems = Counter(path.stem for path in FILES if path.stem != "__init__")
    assert {stem for stem, count in stems.items() if count > 1} == set()


def test_no_two_classes_or_public_functions_have_one_name():
    defined = Counter(
        node.name
        for tree in TREES.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) or (isinstance(node, ast.FunctionDef) and not node.name.startswith("_"))
    )
    assert {name for name, count in defined.items() if count > 1} == set()


# --- tests mirror modules ---------------------------------------------------------------------------------------------

WITHOUT_CODE = {"types.py"}


def test_every_module_has_its_test_file():
    tests = Path(__file__).parents[1]
    modules = [p.relative_to(PACKAGE) for p in FILES if p.stem != "__init__"]
    missing = {
        str(p) for p in modules if str(p) not in WITHOUT_CODE and not (tests / p.parent / f"test_{p.name}").exists()
    }
    assert missing == set()


# --- how much there is ------------------------------------------------------------------------------------------------

MOST_LINES = 15_600
"""Of code: without docstrings, comments and blank lines. A number goes up only with a feature that is worth reading, in
the commit that brings it."""
MOST_ANYS = 28
"""Occurrences of the word `Any`, which says that nobody knows."""
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of_code(text: str) -> int:
    """How many lines have code on them.

    >>> lines_of_code('''x = (  # one
    ...
    ...     1)''')
    2
    """
    documentation = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documentation.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in NO_CODE]
    return len({line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - documentation)


def test_it_grows_no_further():
    texts = [path.read_text() for path in FILES]
    assert sum(map(lines_of_code, texts)) <= MOST_LINES
    assert sum(len(re.findall(r"\bAny\b", text)) for text in texts) <= MOST_ANYS
