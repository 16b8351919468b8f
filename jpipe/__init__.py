"""jpipe: pipeline parallelism for Flax models, exactly equal to the sequential model."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from jpipe.cutting.found_layers import layers_of
from jpipe.cutting.places import cut
from jpipe.layers.base import Shared
from jpipe.layers.calls import Arguments
from jpipe.layers.connections import pop, reads, stash
from jpipe.layers.frozen import freeze
from jpipe.layers.plain import Layer
from jpipe.partitioner.users_mesh import make_mesh
from jpipe.pipeline import Pipeline
from jpipe.planning.partition import Partition, partition
from jpipe.processes.joining import initialize
from jpipe.processes.progress import show_progress
from jpipe.processes.watching import watch
from jpipe.schedules.actions import Action
from jpipe.schedules.orders import make_schedule, zero_bubble
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.simulate import Timeline, simulate
from jpipe.tools.figures import compare
from jpipe.tools.forecaster import Forecast, forecast
from jpipe.tools.profile import Profile, profile
from jpipe.tools.search import plan
from jpipe.training.per_layer import per_layer
from jpipe.training.train_state import TrainState

if _TYPE_CHECKING:
    from jpipe.checkpoints.checkpointer import Checkpointer, load_layers, load_model

__version__ = "0.1.0"
__all__ = [
    "Action", "Arguments", "Checkpointer", "Forecast", "Layer", "Partition", "Pipeline", "Profile", "Schedule",
    "Shared", "Timeline", "TrainState", "compare", "cut", "forecast", "freeze", "initialize", "layers_of",
    "load_layers", "load_model", "make_mesh", "make_schedule", "partition", "per_layer", "plan", "pop", "profile",
    "reads", "show_progress", "simulate", "stash", "watch", "zero_bubble",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Imports what needs orbax when it is asked for."""
    if name in ("Checkpointer", "load_layers", "load_model"):
        from jpipe.checkpoints import checkpointer

        return getattr(checkpointer, name)
    raise AttributeError(f"module 'jpipe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
