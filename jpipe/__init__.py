"""jpipe: pipeline parallelism for Flax models, exactly equal to the sequential model."""

from jpipe.connections import pop as pop
from jpipe.connections import reads as reads
from jpipe.connections import stash as stash
from jpipe.layers import Layer as Layer
from jpipe.optimizer import TrainState as TrainState
from jpipe.optimizer import per_layer as per_layer
from jpipe.orders import make_schedule as make_schedule
from jpipe.partition import Partition as Partition
from jpipe.partition import partition as partition
from jpipe.pipeline import Pipeline as Pipeline
from jpipe.schedule import Action as Action
from jpipe.schedule import Schedule as Schedule
from jpipe.shared import Shared as Shared
from jpipe.simulate import Timeline as Timeline
from jpipe.simulate import simulate as simulate

__version__ = "0.1.0"
