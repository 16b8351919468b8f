"""What processes agree on, in words; that they do is tested in tests/end_to_end/test_processes.py."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
from jpipe.configuration import Agreement, check_agreement, differences, facts, processes_of


def test_a_process_alone_agrees():
    check_agreement({"num_stages": "2"}, [0])


def test_what_differs_is_named_with_its_values():
    facts = {f"field {i}": "1" for i in range(5)}
    message = differences({0: facts, 1: facts, 2: {name: "2" for name in facts}})
    assert message.startswith("the processes disagree on field 0: 1 in process 0, 1, 2 in process 2; field 1")
    assert "(and 2 more)" in message


# --- comparing facts --------------------------------------------------------------------------------------------------


BATCH = np.ones((8, 4), np.float32)


def make(width=4, **options):
    layers = [nn.Dense(width), nn.Dense(4)]
    sizes = {"num_stages": 2, "num_microbatches": 2}
    return jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), **sizes, **({"balance": "even"} | options)).planner


def found(batch=BATCH, values=True, key=None, **options):
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
    ({"unroll": True}, {"shard_over, gather, cast, unroll, ends, offload"}),
    ({"loss_over": "batch"}, {"rings, loss_over"}),
    ({"balance": [1.0, 1.05]}, {"costs of layers"}),
    ({"batch": BATCH[:4]}, {"batch", "the values of batch (rows of this process alone go through pipe.place)"}),
    ({"batch": 2 * BATCH}, {"the values of batch (rows of this process alone go through pipe.place)"}),
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
        other = facts(pipe.planner.plan_for(BATCH), BATCH, values=True)
    else:
        other = found(**changed)
    here = found()
    assert {name for name in here.keys() | other.keys() if here.get(name) != other.get(name)} == names


def test_which_axes_split_examples_is_compared(make_mesh):
    mesh = make_mesh((2, 2, 1), ("stage", "data", "expert"))
    here, other = found(mesh=mesh), found(mesh=mesh, batch_axes=("data", "expert"))
    assert {name for name in here if here[name] != other[name]} == {"batch_axes"}


def test_values_do_not_matter_for_initialisation():
    assert found(values=False) == found(2 * BATCH, values=False)


def test_keys_are_compared_by_their_data():
    words = [found(key=jax.random.key(seed))["key"] for seed in (0, 0, 1)]
    assert words[0] == words[1] != words[2]


def test_one_process_agrees_with_itself():
    planner = make()
    assert processes_of(planner.request.mesh) == (0,)
    Agreement(planner).check(BATCH, "train")  # without a plan: nothing is compared
