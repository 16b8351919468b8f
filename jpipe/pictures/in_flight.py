"""What stages hold over time: below each other, for each stage how many micro-batches are in flight on it."""

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from jpipe.pictures import palette
from jpipe.pictures.bars import HEIGHT
from jpipe.pictures.gantt import label_stages, write_beside
from jpipe.schedules.simulate import Timeline


def peak(timeline: Timeline) -> float:
    """The most that any stage holds, in micro-batches: a chunk of V holds a V-th of one."""
    return max(timeline.peak_in_flight) / timeline.schedule.num_chunks


def draw_memory(axes: Axes, timeline: Timeline, *, scale: float) -> None:
    """Draws an area for each stage, the first stage on top; beside it how much its peak is.

    Args:
      axes: where.
      timeline: of a schedule that trains.
      scale: how many micro-batches are as high as the line of a stage.
    """
    num_stages, num_chunks = timeline.schedule.num_stages, timeline.schedule.num_chunks
    for stage in range(num_stages):
        base = stage + HEIGHT / 2
        axes.add_patch(Rectangle((0, base), timeline.makespan, -HEIGHT, facecolor=palette.SCALE))
        times, counts = zip(*timeline.in_flight(stage), strict=True)
        heights = [base - HEIGHT * count / num_chunks / scale for count in counts]
        axes.stairs(heights, [*times, timeline.makespan], baseline=base, fill=True, color=palette.MEMORY, snap=False)
        most = timeline.peak_in_flight[stage] / num_chunks
        write_beside(axes, f"peak {most:g}" if stage == 0 else f"{most:g}", (timeline.makespan, stage))
    label_stages(axes, num_stages)
