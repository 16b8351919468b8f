"""Nothing but the seam names what isn't public, documented API of JAX, Flax, orbax or Python."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jpipe"
PRIVATE_MODULES = (
    "jax._src",
    "jax.interpreters",
    "jax.lib",
    "jax.experimental.layout",
    "jax.extend.linear_util",
    "jax.extend.source_info_util",
    "jaxlib",
    "flax.nnx.variablelib",
    "orbax.checkpoint._src",
)
PRIVATE_NAMES = {  # attributes of objects of JAX, and functions that no page describes
    *("ctx", "manager", "source_info", "name_stack", "update_axis_types", "global_state"),
    *("use_eager_sharding", "variable_name_from_type", "variablelib"),
}
PRIVATE_KEYWORDS = {"axis_env", "allow_register", "instantiate"}
FIELDS = {"eqns", "invars", "outvars", "constvars", "params", "effects", "ctx"}  # of jaxprs, for `replace`
DOCUMENTED = {"_exit", "_getframe", "_fields", "_replace", "_asdict", "_make"}  # of `os`, `sys`, named tuples
ERRORS = {"error", "exception", "e", "err", "exc"}


def uses(text: str) -> list[str]:
    """What some code uses that isn't public, each as a sentence."""
    found = []
    for node in ast.walk(ast.parse(text)):
        found += [f"line {getattr(node, 'lineno', '?')}: {what}" for what in _used(node)]
    return found


def _used(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [f"import {alias.name}" for alias in node.names if _is_private(alias.name)]
    if (
        isinstance(node, ast.ImportFrom)
        and node.module
        and node.module.partition(".")[0] not in ("jpipe", "__future__")
    ):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        return [f"import {name}" for name in names if _is_private(name) or name.rpartition(".")[2] in PRIVATE_NAMES]
    if isinstance(node, ast.Attribute):
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        hidden = node.attr.startswith("_") and not node.attr.startswith("__") and node.attr not in DOCUMENTED
        named = _is_private(ast.unparse(node))
        return [f"attribute {ast.unparse(node)}"] if node.attr in PRIVATE_NAMES or (hidden and not own) or named else []
    if isinstance(node, ast.Call):
        keywords = {keyword.arg for keyword in node.keywords if keyword.arg}
        function = ast.unparse(node.func)
        surgery = FIELDS & keywords if function.endswith(".replace") and function != "dataclasses.replace" else set()
        return [f"keyword {name}= in {function}" for name in sorted(PRIVATE_KEYWORDS & keywords | surgery)]
    return [f"words that may change: {ast.unparse(node)}"] if _matches_words(node) else []


def _is_private(name: str) -> bool:
    """Whether a dotted name is a private module's, or in one, or has a part that begins with an underscore."""
    listed = any(name == module or name.startswith(f"{module}.") for module in PRIVATE_MODULES)
    foreign = name.partition(".")[0] in ("jax", "flax", "optax", "orbax", "ocp", "nnx", "nn", "np", "numpy")
    return listed or (foreign and any(p.startswith("_") and not p.startswith("__") for p in name.split(".")))


def _matches_words(node: ast.AST) -> bool:
    """`"..." in str(error)`, `error.args[0] == ...`, and the like; of a dtype or a program too."""
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    of_error = lambda x: isinstance(x, ast.Name) and x.id in ERRORS
    text = lambda x: isinstance(x, ast.Call) and ast.unparse(x.func) in ("str", "repr")
    args = lambda x: isinstance(x, ast.Attribute) and x.attr in ("args", "message") and of_error(x.value)
    return any(text(inner) or args(inner) for side in sides for inner in ast.walk(side))


SEAM = {"jax/inside.py", "jax/primitives.py", "processes/runtime.py"}
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if str(path.relative_to(PACKAGE)) not in SEAM]


def test_only_the_seam_uses_what_is_not_public():
    faults = [f"{path.relative_to(PACKAGE)}, {use}" for path in FILES for use in uses(path.read_text())]
    assert not faults, "Use what is documented, or make an entry in jpipe/jax/inside.py"


@pytest.mark.parametrize(
    "code",
    [
        "import jax._src.core",
        "def f():\n    from jax._src.distributed import global_state",
        "import jax\njax.experimental.layout.Layout((0, 1))",
        "from flax.nnx import variablelib",
        "from orbax.checkpoint._src import multihost",
        "str(equation.source_info.name_stack)",
        "threading._register_atexit(close)",
        "jax.make_jaxpr(f, axis_env=[('a', 2)])",
        "nnx.variable_name_from_type(t, allow_register=True)",
        "equation.replace(invars=variables)",
        "try:\n    f()\nexcept ValueError as error:\n    if 'no cluster' in str(error): raise",
        "hashed = 'fry' in str(key.dtype)",
    ],
)
def test_each_is_caught(code):
    assert uses(code)


@pytest.mark.parametrize(
    "code",
    [
        "from jax.extend.core import JaxprEqn, jaxpr_as_fun\nfrom jax.core import Tracer",
        "from jpipe.jax.inside import carry_out",
        "self._own + cls._count + type(self).__name__",
        "dataclasses.replace(step, params=3)",
        "os._exit(1)",
        "now._replace(row=1)",
        "raise ValueError(f'{error}') from error",
    ],
)
def test_what_is_public_is_not(code):
    assert not uses(code)
