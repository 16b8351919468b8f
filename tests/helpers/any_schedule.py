"""Any valid schedule, drawn by hypothesis."""

import random

from hypothesis import strategies as st

from jpipe.schedules.actions import Action, Placed
from jpipe.schedules.placement import Placement
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.timing import needs


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """A random order that respects the dependencies, dealt out to the stages."""
    num_stages, num_microbatches, num_chunks = (draw(st.integers(1, high)) for high in (4, 5, 3))
    slots = draw(st.sampled_from([("F", "B"), ("B", "F"), ("FB",), ("BF", "F"), ("F", "F", "B"), ("F",), ("F", "F")]))
    seed = random.Random(draw(st.integers(0, 2**32)))
    kinds = sorted(set("".join(slots)))
    every = [
        (stage, Action(kind, m, v))
        for kind in kinds
        for stage in range(num_stages)
        for m in range(num_microbatches)
        for v in range(num_chunks)
    ]
    style = draw(st.sampled_from(["loop", "v"])) if num_chunks == 2 else "loop"
    placement = Placement(num_stages, num_chunks, style)
    eager = {placed: seed.random() for placed in every}
    done: set[Placed] = set()
    orders: list[list[Action]] = [[] for _ in range(num_stages)]
    while len(done) < len(every):
        ready = [p for p in every if p not in done and all(need in done for need in needs(placement, *p))]
        stage, action = min(ready, key=lambda placed: eager[placed])
        done.add((stage, action))
        orders[stage].append(action)
    return Schedule(orders, slots=slots, style=style)
