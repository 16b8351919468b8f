"""What users pass, compared with a plan or a model; that calls check it is in tests/end_to_end/test_errors.py."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization

import jpipe
from jpipe.checks import (
    Agreement,
    check_agreement,
    check_alive,
    check_complete,
    check_enough_layers,
    check_is_variables,
    check_key,
    check_variables,
    differences,
    facts,
    refuse_serialization,
)
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


def test_variables(ready):
    plan, variables = ready
    check_variables(plan, variables)
    check_variables(plan, {"params": variables["params"]})
    check_complete(plan, variables)
    with pytest.raises(ValueError, match="variables lack the collection 'batch_stats'"):
        check_complete(plan, {"params": variables["params"]})
    with pytest.raises(ValueError, match="unknown collection 'cache'; expected"):
        check_variables(plan, variables | {"cache": variables["params"]})
    with pytest.raises(TypeError, match=r"variables\['params'\] is a dict, not laid out by a pipeline"):
        check_variables(plan, {"params": {}})
    with pytest.raises(ValueError, match=r"laid out by another pipeline \(num_stages=2, here 1"):
        check_variables(planned(num_stages=1)[1], variables)
    with pytest.raises(ValueError, match=r"laid out by another pipeline \(its layers, balance or mesh differ\)"):
        check_variables(planned([nn.Dense(4) for _ in range(5)])[1], {"params": variables["params"]})
    narrow = {"params": jax.tree.map(lambda a: a.astype(np.float16), variables["params"])}
    with pytest.raises(ValueError, match=r"variables\['params'\].* has the dtype float16, not float32 as at init"):
        check_variables(plan, narrow)


def test_what_is_no_variables(ready):
    _, variables = ready
    check_is_variables(variables)
    for wrong, message in (
        (variables["params"], "variables is a single collection; pass them by collection"),
        ([variables], r"variables is a list; lay out trees of layers by pipe\.from_layer_variables"),
        ({}, r"variables is a dict; pass what pipe\.init returned"),
        (jpipe.TrainState(0, variables, None, None, None), r"variables is a TrainState; pass state\.variables"),
    ):
        with pytest.raises(TypeError, match=message):
            check_is_variables(wrong)


def test_keys(ready):
    plan, _ = ready
    check_key(plan.model, plan.loss, None)
    _, drops = planned([nn.Dense(4), nn.Dropout(0.5), nn.Dense(4)])
    check_key(drops.model, drops.loss, jax.random.key(0))
    with pytest.raises(ValueError, match=r"layer 1 \(Dropout\) draws random numbers, but key=None"):
        check_key(drops.model, None, None)


def test_enough_layers():
    check_enough_layers(4, 2, 2)
    with pytest.raises(ValueError, match=r"num_stages=2 times num_chunks=2 is more than the 3 layers"):
        check_enough_layers(3, 2, 2)


def test_donated_arrays():
    array = jnp.ones(3)
    check_alive("state", {"a": array, "b": np.ones(3)})
    array.delete()
    with pytest.raises(ValueError, match=r"state: these arrays were donated .* go on with the state that it returned"):
        check_alive("state", {"a": array})


# --- saving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [StageTree, TrainState])
def test_flax_refuses_and_names_the_remedy(kind):
    refuse_serialization()  # again: it replaces what it registered
    for call in (serialization.to_state_dict, lambda target: serialization.from_state_dict(target, {})):
        with pytest.raises(TypeError, match=r"save tree = jax\.device_get\(pipe\.model_variables\(variables\)\)"):
            call(kind.__new__(kind))


# --- processes that compute together ----------------------------------------------------------------------------------


def test_a_process_alone_agrees():
    check_agreement({"num_stages": "2"}, [0])


def test_what_differs_is_named_with_its_values():
    facts = {f"field {i}": "1" for i in range(5)}
    message = differences({0: facts, 1: facts, 2: {name: "2" for name in facts}})
    assert message.startswith("the processes disagree on field 0: 1 in process 0, 1, 2 in process 2; field 1")
    assert "(and 2 more)" in message


# --- comparing facts --------------------------------------------------------------------------------------------------


INPUTS = np.ones((8, 4), np.float32)


def make(width=4, **options):
    layers = [nn.Dense(width), nn.Dense(4)]
    sizes = {"num_stages": 2, "num_microbatches": 2}
    return jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), **sizes, **({"balance": "even"} | options)).planner


def found(batch=INPUTS, values=True, key=None, **options):
    return facts(make(**options).plan_for(batch), batch, values=values, key=key)


def test_equal_pipelines_have_equal_words():
    assert found() == found()
    assert all(isinstance(word, str) for word in found().values())


CHANGES = [
    ({"width": 5}, {"layer 0", "layer 1"}),
    ({"num_microbatches": 4}, {"num_microbatches", "schedule"}),
    ({"schedule": "gpipe"}, {"schedule"}),
    ({"remat": "none"}, {"remat"}),
    ({"remat": jax.checkpoint_policies.dots_saveable}, {"remat"}),
    ({"ends": "spread"}, {"ends"}),
    ({"loss_over": "batch"}, {"loss_over"}),
    ({"balance": [1.0, 1.05]}, {"costs of layers"}),
    ({"batch": INPUTS[:4]}, {"batch", "the values of batch (own rows go through pipe.place)"}),
    ({"batch": 2 * INPUTS}, {"the values of batch (own rows go through pipe.place)"}),
    ({"key": jax.eval_shape(lambda: jax.random.key(0))}, set()),
]


@pytest.mark.parametrize(
    ("changed", "names"),
    CHANGES,
    ids=[next(iter(changed)) + str(i) for i, (changed, _) in enumerate(CHANGES)],
)
def test_what_differs_is_named(changed, names):
    if "num_microbatches" in changed:
        layers = [nn.Dense(4), nn.Dense(4)]
        pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=2, balance="even", **changed)
        other = facts(pipe.planner.plan_for(INPUTS), INPUTS, values=True)
    else:
        other = found(**changed)
    here = found()
    assert {name for name in here.keys() | other.keys() if here.get(name) != other.get(name)} == names


def test_which_axes_split_examples_is_compared(make_mesh):
    mesh = make_mesh((2, 2, 1), ("stage", "data", "expert"))
    here, other = found(mesh=mesh), found(mesh=mesh, batch_axes=("data", "expert"))
    assert {name for name in here if here[name] != other[name]} == {"batch_axes"}


def test_values_do_not_matter_for_initialisation():
    assert found(values=False) == found(2 * INPUTS, values=False)


def test_keys_are_compared_by_their_data():
    words = [found(key=jax.random.key(seed))["key"] for seed in (0, 0, 1)]
    assert words[0] == words[1] != words[2]


def test_one_process_agrees_with_itself():
    planner = make()
    Agreement(planner).check(INPUTS, "train")  # without a plan: nothing is compared
