"""jpipe: pipeline parallelism for Flax models, exactly equal to the sequential model."""

from jpipe.layers.base import Layer as Layer
from jpipe.layers.connections import pop as pop
from jpipe.layers.connections import reads as reads
from jpipe.layers.connections import stash as stash
from jpipe.layers.shared import Shared as Shared
from jpipe.pipeline import Pipeline as Pipeline
from jpipe.planning.partition import Partition as Partition
from jpipe.planning.partition import partition as partition
from jpipe.processes.joining import initialize as initialize
from jpipe.schedules.actions import Action as Action
from jpipe.schedules.orders import make_schedule as make_schedule
from jpipe.schedules.schedule import Schedule as Schedule
from jpipe.schedules.simulate import Timeline as Timeline
from jpipe.schedules.simulate import simulate as simulate
from jpipe.sharding.device_order import make_mesh as make_mesh
from jpipe.training.per_layer import per_layer as per_layer
from jpipe.training.state import TrainState as TrainState

__version__ = "0.1.0"
