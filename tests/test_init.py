"""What `import jpipe` gives: the names that users were promised, and nothing slow."""

import subprocess
import sys

import pytest

import jpipe
from jpipe.checkpoints import checkpointer

PUBLIC = {
    "Action", "Arguments", "Checkpointer", "Forecast", "Layer", "Partition", "Pipeline", "Profile", "Schedule",
    "Shared", "Timeline", "TrainState", "compare", "cut", "forecast", "freeze", "initialize", "layers_of",
    "load_layers", "load_model", "make_mesh", "make_schedule", "partition", "per_layer", "plan", "pop", "profile",
    "reads", "show_progress", "simulate", "stash", "watch", "zero_bubble",
}  # fmt: skip


def test_dir_lists_what_users_may_use():
    """A regression: it listed what the package's own code imports, and lacked what is imported on demand."""
    assert dir(jpipe) == sorted({*PUBLIC, "__version__"})
    assert all(getattr(jpipe, name) for name in PUBLIC)


def test_a_star_imports_what_users_may_use():
    """A regression: TYPE_CHECKING and the folders came along, Checkpointer and load_layers didn't."""
    names = {}
    exec("from jpipe import *", names)
    assert names.keys() - {"__builtins__"} == PUBLIC


def test_what_needs_orbax_is_imported_when_it_is_asked_for():
    assert jpipe.Checkpointer is checkpointer.Checkpointer and jpipe.load_layers is checkpointer.load_layers
    code = "import sys, jpipe; sys.exit(bool({'matplotlib', 'orbax'} & {name.split('.')[0] for name in sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'jpipe' has no attribute 'Pipelines'"):
        jpipe.Pipelines  # noqa: B018
