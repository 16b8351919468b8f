"""Any valid schedule, drawn by hypothesis."""

import random

from hypothesis import strategies as st

from jpipe.schedules.actions import Action, Orders, Placed, admitted, needs
from jpipe.schedules.schedule import Schedule

SLOTS = [
    *[("F", "B"), ("B", "F"), ("FB",), ("BF", "F"), ("F", "F", "B"), ("F",), ("F", "F")],
    *[("F", "B", "W"), ("FBW",), ("F", "BW"), ("F", "I", "W"), ("W", "FI"), ("FR", "B"), ("FRBW", "BW")],
]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """A random order that respects the dependencies, dealt out to the stages."""
    num_stages, num_microbatches, num_chunks = (draw(st.integers(1, high)) for high in (4, 5, 3))
    slots = draw(st.sampled_from(SLOTS))
    seed = random.Random(draw(st.integers(0, 2**32)))
    kinds = {*"".join(map(admitted, slots))}
    backwards = [parts for parts in ("B", "IW", "RB", "RIW") if {*parts} <= kinds] or [""]
    every = [
        (stage, Action(kind, m, v))
        for stage in range(num_stages)
        for m in range(num_microbatches)
        for v in range(num_chunks)
        for kind in "F" + seed.choice(backwards)
    ]
    style = draw(st.sampled_from(["loop", "v"])) if num_chunks == 2 else "loop"
    chosen = Orders(tuple(tuple(a for k, a in every if k == stage) for stage in range(num_stages)), slots, style)
    eager = {placed: seed.random() for placed in every}
    done: set[Placed] = set()
    orders: list[list[Action]] = [[] for _ in range(num_stages)]
    while len(done) < len(every):
        ready = [p for p in every if p not in done and all(need in done for need in needs(chosen, *p))]
        stage, action = min(ready, key=lambda placed: eager[placed])
        done.add((stage, action))
        orders[stage].append(action)
    return Schedule(orders, slots=slots, style=style)
