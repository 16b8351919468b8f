"""What users pass, compared with a plan or a model; that calls check it is in tests/end_to_end/test_errors.py."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization

import jpipe
from jpipe.checks import check_complete, check_variables, differences, facts, refuse_serialization
from jpipe.memory.layout import StageTree
from jpipe.training.train_state import TrainState

BATCH = {"inputs": np.ones((8, 4), np.float32), "targets": np.zeros((8, 4), np.float32)}


def planned(layers=None, num_stages=2):
    layers = layers or [nn.Dense(4), nn.BatchNorm(use_running_average=False), nn.Dense(4)]
    loss = lambda y, batch: jnp.mean(y - batch["targets"])
    pipe = jpipe.Pipeline(layers, loss, num_stages=num_stages, num_microbatches=2, balance="even")
    return pipe, pipe.planner.plan_for(BATCH)


@pytest.fixture(scope="module")
def ready():
    """A plan, and variables of it."""
    pipe, plan = planned()
    return plan, pipe.init(jax.random.key(0), BATCH)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda v: v | {"cache": v["params"]}, ValueError, "unknown collection 'cache'; expected"),
        (lambda v: {"params": {}}, TypeError, r"variables\['params'\] is a dict, not laid out by a pipeline"),
        (
            lambda v: jax.tree.map(lambda a: a.astype(np.float16), v),
            ValueError,
            "the dtype float16, not float32 as at init",
        ),
    ],
)
def test_variables(ready, change, error, message):
    plan, variables = ready
    check_variables(plan, variables)
    check_variables(plan, {"params": variables["params"]})
    check_complete(plan, variables)
    with pytest.raises(ValueError, match="variables lack the collection 'batch_stats'"):
        check_complete(plan, {"params": variables["params"]})
    with pytest.raises(error, match=message):
        check_variables(plan, change(variables))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"num_stages": 1}, r"\(num_stages=2, here 1"),
        ({"layers": [nn.Dense(4) for _ in range(5)]}, r"\(its layers, balance or mesh differ\)"),
    ],
)
def test_variables_of_another_pipeline(ready, other, message):
    with pytest.raises(ValueError, match=f"laid out by another pipeline {message}"):
        check_variables(planned(**other)[1], {"params": ready[1]["params"]})


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
    sizes = {"num_stages": 2, "num_microbatches": 2, "balance": "even"}
    return jpipe.Pipeline([nn.Dense(width), nn.Dense(4)], lambda y, _: jnp.mean(y), **sizes | options).planner


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
