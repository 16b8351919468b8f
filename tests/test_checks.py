"""What users pass, compared with a plan or a model; that calls check it is in tests/end_to_end/test_errors.py."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization

import small_pipeline
from jpipe.checks import differences, facts, refuse_serialization
from jpipe.memory.layout import StageTree
from jpipe.training.train_state import TrainState

# --- saving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [StageTree, TrainState])
def test_flax_refuses_and_names_the_remedy(kind):
    refuse_serialization()  # again: it replaces what it registered
    for call in (serialization.to_state_dict, lambda target: serialization.from_state_dict(target, {})):
        with pytest.raises(TypeError, match=r"save tree = jax\.device_get\(pipe\.model_variables\(variables\)\)"):
            call(kind.__new__(kind))


# --- processes that compute together ----------------------------------------------------------------------------------


def test_what_differs_is_named_with_its_values():
    facts = {f"field {i}": "1" for i in range(5)}
    message = differences({0: facts, 1: facts, 2: {name: "2" for name in facts}})
    assert message.startswith("the processes disagree on field 0: 1 in process 0, 1, 2 in process 2; field 1")
    assert "(and 2 more)" in message


# --- comparing facts --------------------------------------------------------------------------------------------------


INPUTS = np.ones((8, 4), np.float32)


def make(width=4, **options):
    return small_pipeline.make([nn.Dense(width), nn.Dense(4)], lambda y, _: jnp.mean(y), **options).planner


def found(batch=INPUTS, values=True, key=None, **options):
    return facts(make(**options).plan_for(batch), batch, values=values, key=key)


VALUES = "the values of batch (own rows go through pipe.place)"


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"width": 5}, {"layer 0", "layer 1"}),
        ({"num_microbatches": 4}, {"num_microbatches", "schedule"}),
        ({"schedule": "gpipe"}, {"schedule"}),
        ({"remat": "none"}, {"remat"}),
        ({"remat": jax.checkpoint_policies.dots_saveable}, {"remat"}),
        ({"ends": "spread"}, {"ends"}),
        ({"loss_over": "batch"}, {"loss_over"}),
        ({"balance": [1.0, 1.05]}, {"costs of layers"}),
        ({"mesh": ("data", "expert"), "batch_axes": ("data", "expert")}, {"batch_axes"}),
        ({"batch": INPUTS[:4]}, {"batch", VALUES}),
        ({"batch": 2 * INPUTS}, {VALUES}),
        ({"batch": 2 * INPUTS, "values": False}, set()),
        ({"key": jax.random.key(1)}, {"key"}),
        ({}, set()),
    ],
    ids=lambda part: ",".join(part) if isinstance(part, dict) else "",
)
def test_what_differs_is_named(changed, names, make_mesh):
    """What processes compare; of initialisation the batch's values don't matter."""
    same = {"values": changed["values"]} if "values" in changed else {}
    same |= {"key": jax.random.key(0)} if "key" in changed else {}
    if "mesh" in changed:
        same["mesh"] = make_mesh((2, 2, 1), ("stage", *changed["mesh"]))
    here, other = found(**same), found(**changed | {k: v for k, v in same.items() if k == "mesh"})
    assert {name for name in here.keys() | other.keys() if here.get(name) != other.get(name)} == names
