"""jpipe: pipeline parallelism for Flax models, exactly equal to the sequential model."""

from typing import TYPE_CHECKING

from jpipe.layers.base import Layer as Layer
from jpipe.layers.connections import pop as pop
from jpipe.layers.connections import reads as reads
from jpipe.layers.connections import stash as stash
from jpipe.layers.shared import Shared as Shared
from jpipe.mesh.device_order import make_mesh as make_mesh
from jpipe.pictures.figures import compare as compare
from jpipe.pipeline import Pipeline as Pipeline
from jpipe.planning.partition import Partition as Partition
from jpipe.planning.partition import partition as partition
from jpipe.processes.joining import initialize as initialize
from jpipe.profiling.profile import Profile as Profile
from jpipe.profiling.profile import profile as profile
from jpipe.schedules.actions import Action as Action
from jpipe.schedules.orders import make_schedule as make_schedule
from jpipe.schedules.schedule import Schedule as Schedule
from jpipe.schedules.simulate import Timeline as Timeline
from jpipe.schedules.simulate import simulate as simulate
from jpipe.terminal.progress import show_progress as show_progress
from jpipe.training.per_layer import per_layer as per_layer
from jpipe.training.train_state import TrainState as TrainState

if TYPE_CHECKING:
    from jpipe.checkpoints.checkpointer import Checkpointer as Checkpointer
    from jpipe.checkpoints.checkpointer import load_layers as load_layers

__version__ = "0.1.0"

_ON_DEMAND = ("Checkpointer", "load_layers")
"""What is imported when it is asked for: it needs orbax."""


def __getattr__(name: str) -> object:
    if name in _ON_DEMAND:
        from jpipe.checkpoints import checkpointer

        return getattr(checkpointer, name)
    raise AttributeError(f"module 'jpipe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_DEMAND} - {"TYPE_CHECKING"})
