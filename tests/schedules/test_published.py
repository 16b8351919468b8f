"""Published orders, action for action; and that any sizes make one."""

import pytest

from jpipe.schedules.orders import SCHEDULES
from jpipe.schedules.schedule import Schedule

PUBLISHED = {name: SCHEDULES[name] for name in ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v")}

ORDERS = {
    "zb-h1": """
        F0 F1 F2 I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        F0 F1 I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4
    """,
    "zb-h2": """
        F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
        F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
        F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """,
    "v-half": """
        F0 F1 F0.1 I0.1 W0.1 F2 F1.1 I1.1 W1.1 I0 W0 F2.1 I2.1 W2.1 I1 W1 I2 W2
        F0 F0.1 F1 I0.1 W0.1 F1.1 F2 I0 I1.1 W1.1 F2.1 W0 I1 I2.1 W2.1 W1 I2 W2
        F0 F0.1 F1 F1.1 I0.1 W0.1 I0 W0 F2 F2.1 I1.1 W1.1 I1 W1 I2.1 W2.1 I2 W2
    """,
    "v-min": """
        F0 F0.1 F1 I0.1 W0.1 F1.1 F2 I0 I1.1 W1.1 W0 F2.1 I1 I2.1 W2.1 W1 I2 W2
        F0 F0.1 F1 I0.1 F1.1 W0.1 I0 F2 W0 I1.1 F2.1 W1.1 I1 W1 I2.1 W2.1 I2 W2
        F0 F0.1 F1 F1.1 I0.1 I0 W0.1 W0 F2 F2.1 I1.1 I1 W1.1 W1 I2.1 I2 W2.1 W2
    """,
}
"""Three stages; of five micro-batches there, of three here and back."""


@pytest.mark.parametrize("name", ORDERS)
def test_order_is_as_drawn(name):
    drawn = [line.split() for line in ORDERS[name].strip().splitlines()]
    made = PUBLISHED[name](3, 3 if name.startswith("v") else 5, 2)
    assert [list(map(str, order)) for order in made.actions] == drawn
    assert (made.name, made.slots, made.style) == (name, ("FBW",), "v" if made.num_chunks == 2 else "loop")


@pytest.mark.parametrize("name", PUBLISHED)
def test_any_sizes_make_an_order(name):
    """One that isn't valid would raise."""
    for num_stages in (1, 2, 3, 4, 6, 7):
        for num_microbatches in (1, 2, 3, 5, 8, 14):
            made = PUBLISHED[name](num_stages, num_microbatches, 2)
            assert isinstance(made, Schedule)
            assert (made.num_stages, made.num_microbatches) == (num_stages, num_microbatches)
