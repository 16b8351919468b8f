"""Searched settings against all settings, and what `plan` says when there is none."""

import itertools
import math
import warnings
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from jpipe.tools import search
from jpipe.tools.chips import CHIPS, mesh_of_nowhere
from jpipe.tools.memory_model import predict_memory
from jpipe.tools.search import Choice, Choices, Setting, sorted_out
from jpipe.tools.step_cost import Parts
from jpipe.tools.time_model import layer_seconds, predict_time
from published import schedule_of

pytestmark = pytest.mark.filterwarnings("ignore:layer .* alone takes:UserWarning")  # small models, badly balanced

WORDS, WIDTH, BATCH = 512, 64, 8
TX = optax.sgd(0.1, momentum=0.9)


def loss_fn(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def layers_of(count, split=False):
    own = nn.initializers.lecun_normal()
    make = nn.with_partitioning(own, (None, "tensor")) if split else own
    return [nn.Embed(WORDS, WIDTH), *[nn.Dense(WIDTH, kernel_init=make) for _ in range(count)], nn.Dense(WORDS)]


LAYERS = layers_of(4)


def words(size=BATCH):
    return {name: jax.ShapeDtypeStruct((size, 32), jnp.int32) for name in ("inputs", "targets")}


@pytest.fixture(scope="module")
def chosen():
    return jpipe.plan(LAYERS, loss_fn, words(), TX, topology="v5e:1x2", num_stages=2, ends="own")


def test_its_choices_are_pipelines_that_train(chosen):
    best = chosen[0]
    pipe = jpipe.Pipeline(LAYERS, loss_fn, **best.options)
    assert dict(pipe.mesh.shape) == dict(best.setting.axes)
    batch = {name: np.ones(a.shape, a.dtype) for name, a in words().items()}
    state = pipe.create_state(jax.random.key(0), batch, TX)
    _, metrics = pipe.train_step(state, batch)
    assert metrics["finite"]


def test_what_it_says_is_what_the_models_say(chosen):
    for choice in chosen:
        pipe = jpipe.Pipeline(LAYERS, loss_fn, **choice.options)
        assert choice.seconds == predict_time(pipe.planner, words(), CHIPS["v5e"], tx=TX).step
        held = predict_memory(pipe.planner, words(), TX, CHIPS["v5e"])[0]
        assert choice.total_bytes == sum(choice.bytes.values()) == held.total


def test_layers_are_cut_by_their_predicted_times(chosen):
    best = chosen[0]
    pipe = jpipe.Pipeline(LAYERS, loss_fn, **best.options)
    seconds = layer_seconds(pipe.planner, words(), CHIPS["v5e"])
    cut = jpipe.partition(seconds, 2, num_chunks=best.setting.num_chunks)
    assert list(cut.counts) == best.options["balance"]
    kept = jpipe.plan(LAYERS, loss_fn, words(), TX, topology="v5e:1x2", num_stages=2, balance=[1, 5], num_chunks=1)
    assert {tuple(choice.options["balance"]) for choice in kept} == {(1, 5)}
    assert best.seconds < kept[0].seconds


def test_each_further_choice_is_slower_and_smaller(chosen):
    for faster, smaller in itertools.pairwise(chosen):
        assert faster.seconds <= smaller.seconds
        assert faster.total_bytes > smaller.total_bytes


@pytest.mark.parametrize("memory", [None, 1_400_000])
@pytest.mark.slow  # 156 settings
def test_it_finds_the_best_of_all(memory):
    """Brute force: no setting that fits is faster; with little memory others fit than with much."""
    found = jpipe.plan(layers_of(2), loss_fn, words(), TX, topology="v5e:1x2", memory=memory)[0]
    seconds = []
    ways = [("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("v", 2), ("interleaved", 4)]
    for stages, count, (schedule, chunks), remat, ends, over in itertools.product(
        (1, 2), (1, 2, 4, 8), ways, ("none", "layer", "stage", "full"), ("own", "spread", "shared"), ((), ("data",))
    ):
        axes = {"stage": stages} if stages == 2 else {"stage": 1, "data": 2}
        options = {"num_stages": stages, "num_microbatches": count, "schedule": schedule, "num_chunks": chunks}
        options |= {"remat": remat, "ends": ends, "shard_over": over, "mesh": mesh_of_nowhere(axes)}
        try:
            with warnings.catch_warnings(action="ignore"):
                by_flops = jpipe.Pipeline(layers_of(2), loss_fn, **options)
                costs = layer_seconds(by_flops.planner, words(), CHIPS["v5e"])
                pipe = jpipe.Pipeline(layers_of(2), loss_fn, balance=costs, **options)
                time = predict_time(pipe.planner, words(), CHIPS["v5e"], tx=TX)
                held = predict_memory(pipe.planner, words(), TX, CHIPS["v5e"])[0]
        except ValueError:
            continue
        if memory is None or held.total <= memory:
            seconds.append(time.step)
    assert len(seconds) > 10
    assert found.seconds == min(seconds)


def test_axes_that_the_layers_name_are_used_where_that_is_all_that_fits():
    """One Dense layer is too large for a device, and can't be cut into stages."""
    wide = [nn.Dense(4096, kernel_init=nn.with_partitioning(nn.initializers.zeros, (None, "tensor")))]
    batch = {"inputs": jax.ShapeDtypeStruct((8, 4096), "float32")}
    found = jpipe.plan(
        wide, lambda y, _: jnp.mean(y**2), batch, TX, topology="v5e:1x2", memory=200_000_000, num_microbatches=1
    )
    assert dict(found[0].setting.axes) == {"stage": 1, "data": 1, "tensor": 2}


def test_axes_that_the_user_names():
    layers = layers_of(2, split=True)
    kept = {"num_microbatches": 4, "remat": "layer", "schedule": "1f1b", "ends": "own", "shard_over": ()}
    found = jpipe.plan(layers, loss_fn, words(), TX, topology="v5e:2x4", axes=("replica", "fsdp", "tensor"), **kept)
    for choice in found:
        assert [name for name, _ in choice.setting.axes] == ["stage", "replica", "fsdp", "tensor"]
        assert math.prod(size for _, size in choice.setting.axes) == 8
        assert choice.options["mesh"].axis_names == ("stage", "replica", "fsdp", "tensor")


@pytest.mark.parametrize(
    "pinned",
    [
        pytest.param({"schedule": "v"}, marks=pytest.mark.slow),
        {"schedule": schedule_of("zb-v", 2, 4)},
        {"num_chunks": 2},
        {"axes": "fsdp", "shard_over": ["fsdp"]},
        {"axes": ("stage", "data"), "remat": jax.checkpoint_policies.dots_saveable},
    ],
    ids=str,
)
def test_what_is_pinned_alone_has_the_rest_chosen_to_fit(pinned):
    pinned = {"num_microbatches": 4, "ends": "own"} | pinned
    found = jpipe.plan(layers_of(2), loss_fn, words(), TX, topology="v5e:1x2", **pinned)
    for name, value in pinned.items():
        wanted = (value,) if isinstance(value, str) and name == "shard_over" else value
        assert name == "axes" or found[0].options[name] == (tuple(wanted) if isinstance(wanted, list) else wanted)
    num_chunks = 2 if pinned.get("schedule") == "v" else found[0].setting.num_chunks
    assert found[0].options["num_chunks"] == num_chunks
    assert "<" not in str(found)  # no repr of an object


def test_too_little_memory_is_said_with_the_least_that_would_do():
    said = (
        r"no plan fits in 97.7 KiB a device on v5e:1x2; the smallest takes [\d.]+ KiB \(stage=2, data=1, "
        "num_microbatches=8.*"
        "pass more devices, .* or give the weights of large layers a tensor axis"
    )
    with pytest.raises(ValueError, match=said):
        jpipe.plan(layers_of(2), loss_fn, words(), TX, topology="v5e:1x2", memory=100_000, num_stages=2, remat="full")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": "v9:2x2"}, "topology='v9:2x2' is unknown; pass a chip and a shape such as one of v2:2x2"),
        ({"topology": "v5e:1x2", "devices": []}, "topology='v5e:1x2' and devices are both given"),
        ({"topology": "v5e:1x2", "mesh": None}, "mesh= is what is searched"),
        ({"devices": []}, r"devices=\[\] has nothing to plan for; pass devices such as jax.devices"),
        ({"topology": "h100:64"}, "topology='h100:64' has 64 GPUs in a host, .*, such as h100:8x8"),
        ({"topology": "v5e:1x2", "balance": "time"}, 'balance="time" measures on the mesh; no TPU v5 lite is present'),
        ({"topology": "v5e:1x2", "schedule": "v", "num_chunks": 4}, "num_chunks=4 with 'v'; use"),
        ({"topology": "v5e:1x2", "num_microbatches": 3}, "num_microbatches=3, none suits 2 devices"),
        ({"topology": "v5e:1x2", "remat": "some"}, "no setting is possible: remat='some' is unknown"),
    ],
)
def test_what_is_not_possible_is_said(options, message):
    with pytest.raises(ValueError, match=message):
        jpipe.plan(layers_of(2), loss_fn, words(), TX, **options)


def test_settings_are_rated_as_if_each_were_the_only_one():
    """What others had traced was taken over with how their weights lie: FSDP took no less memory."""
    make = lambda **options: jpipe.Pipeline(layers_of(2, split=True), loss_fn, **options)
    kept = {"num_stages": 1, "num_microbatches": 2, "remat": "layer", "schedule": "1f1b"}
    rated = search.Search(make, words(), TX, CHIPS["v5e"], 10**9, kept).run(4)
    assert {choice.setting.shard_over for choice in rated} == {(), ("data",)}
    assert len({choice.setting.axes for choice in rated}) == 3
    for choice in rated:
        mesh = mesh_of_nowhere(dict(choice.setting.axes))
        pipe = make(mesh=mesh, **choice.options)
        assert choice.seconds == predict_time(pipe.planner, words(), CHIPS["v5e"], tx=TX).step
        assert choice.cost.bytes == predict_memory(pipe.planner, words(), TX, CHIPS["v5e"])[0]


def test_a_setting_that_is_refused_is_left_out():
    """zero_bubble with remat="stage" would compute the forward twice."""
    make = lambda **options: jpipe.Pipeline(layers_of(2), loss_fn, **options)
    kept = {"num_stages": 2, "num_microbatches": 4, "ends": "own"}
    rated = search.Search(make, words(), TX, CHIPS["v5e"], 10**9, kept).run(2)
    assert {"zero_bubble", "1f1b"} <= {choice.setting.schedule for choice in rated}
    assert not [c for c in rated if c.setting.schedule == "zero_bubble" and c.setting.remat in ("stage", "full")]
    assert len({choice.setting for choice in rated}) == len(rated)


ONE_WAY = {"num_stages": 4, "num_microbatches": 8, "schedule": "1f1b", "num_chunks": 1}
ONE_WAY |= {"remat": "none", "ends": "own", "shard_over": ()}


def test_what_goes_to_the_hosts_is_what_the_user_says():
    planned = lambda **options: jpipe.plan(layers_of(8), loss_fn, words(), TX, topology="h100:4", **ONE_WAY, **options)
    (own,), (gone,) = planned(), planned(offload="optimizer")
    assert "offload" not in own.options and gone.options["offload"] == "optimizer"
    assert own.cost.host == {} and gone.cost.host == {"optimizer": own.cost.bytes["optimizer"]}
    assert "on the host: optimizer" in str(planned(offload="optimizer")) and gone.time["host"] > 0
    less = own.total_bytes - own.cost.bytes["optimizer"] / 2
    assert planned(memory=less, offload="optimizer")[0].cost == gone.cost
    with pytest.raises(ValueError, match=r"no plan fits .*; pass more devices, offload=, or a batch"):
        planned(memory=less)


# --- choices ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def choice():
    pipe = jpipe.Pipeline([nn.Dense(8)] * 2, lambda y, _: jnp.mean(y**2), num_stages=2, num_microbatches=2)
    batch = {"inputs": jax.ShapeDtypeStruct((4, 8), "float32")}
    held = predict_memory(pipe.planner, batch, optax.sgd(0.1))[0]
    cost = replace(predict_time(pipe.planner, batch, CHIPS["v5e"]), bytes=held)
    setting = Setting((("stage", 2),), 2)
    return Choice(True, cost, setting, setting.options | {"balance": [2, 1]})


def but(choice, **seconds):
    """The choice, but for some seconds."""
    return replace(choice, cost=replace(choice.cost, seconds=Parts(choice.time, **seconds)))


def slower(choice, factor, bytes_):
    slow = but(choice, computation=choice.time["computation"] + factor)
    return replace(slow, cost=replace(slow.cost, bytes=Parts(choice.cost.bytes, residuals=bytes_)))


def test_only_what_is_smaller_than_all_that_is_faster_is_kept(choice):
    first, second, third = slower(choice, 1, 900), slower(choice, 2, 901), slower(choice, 3, 100)
    assert sorted_out([third, second, first]) == [first, third]


def test_it_is_a_sequence_and_a_table(choice):
    found = Choices("plans", (choice, slower(choice, 1, 5)), ("mind the gap",))
    assert len(found) == 2 and found[0] is choice and found[:1] == (choice,)
    text = str(found)
    assert text.startswith("plans\n") and text.endswith("mind the gap")
    for name in (*choice.bytes, *choice.time, "bubble"):
        assert name.replace("_", " ") in text
    assert "<table>" in found._repr_html_()


REST = ("collectives", "update")


def test_milliseconds_of_small_models_and_of_large_ones(choice):
    """All settings of a small model took "0.0" ms."""
    small = but(choice, computation=2e-6, bubble=5e-8, **dict.fromkeys(REST, 0.0)).column()
    assert (small["ms: step"], small["ms: computation"], small["ms: bubble"]) == ("0.00205", "0.00200", "5.00e-05")
    large = but(choice, computation=12.3456, **dict.fromkeys((*REST, "bubble"), 0.0)).column()
    assert (large["ms: step"], large["ms: bubble"]) == ("12,346", "0.00")


def test_it_says_why_the_first_is_ahead_of_the_second(choice):
    second = but(choice, computation=choice.time["computation"] + 3e-3, bubble=choice.time["bubble"] - 1e-3)
    said = choice.cost.gain_over(second.cost)
    assert said == "2.00 ms: 3.00 ms less computation, 1.00 ms more bubble"
