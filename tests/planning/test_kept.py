"""What actions keep: where it lies, which residuals go to the host and come back, and what is said where none does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jpipe
from cases import assert_equal
from jpipe.memory.storage import Row, build_storage
from jpipe.planning.kept import AwayStorage
from jpipe.processes.progress import warn_once
from small_pipeline import make


def test_a_row_goes_and_comes_back():
    """Two types of records on two virtual stages; a row has room for those of either."""
    leaves = [[jax.ShapeDtypeStruct((2, 3), "float32")], [jax.ShapeDtypeStruct((5,), "int32")]]
    places = build_storage(leaves, [[0, 0, 1], [1]], device_of=[0, 0], rows=[1])
    storage = AwayStorage(places.record_types, places.named_buffers, 1, host_rows=3, moves=False)
    here, host = storage.empty(), storage.empty_host()
    values = [jnp.full((2, 3), float(i)) for i in range(2)]
    for i, value in enumerate(values):
        here = storage.write(here, 0, i, [value], Row(0, 0))
    host = storage.sent(host, storage.leaving(here, jnp.int32(-1)), jnp.int32(2))
    assert {array.shape[0] for array in host.values()} == {3}
    for i in range(2):
        here = storage.write(here, 0, i, [jnp.full((2, 3), 9.0)], Row(0, 0))
    back = storage.fetched(host, jnp.int32(2))
    assert jax.tree.map(jnp.shape, back) == jax.tree.map(jnp.shape, storage.empty_row())
    for i, value in enumerate(values):
        assert_equal(storage.read_back(here, back, 0, i, Row(0, 0, stays=jnp.int32(0))), [value])
        assert_equal(
            storage.read_back(here, back, 0, i, Row(0, 0, stays=jnp.int32(1))), [np.full((2, 3), 9, np.float32)]
        )


OFFLOADS_NAMES = jax.checkpoint_policies.save_and_offload_only_these_names
NAMED = {"names_which_can_be_saved": [], "offload_src": "device", "offload_dst": "pinned_host"}


@pytest.mark.filterwarnings("ignore:offload= moves nothing on CPUs")
def test_a_policy_that_offloads_by_name_or_products():
    def block(params, x):
        hidden = checkpoint_name(jnp.tanh(x @ params["a"]), "hidden")
        return x + hidden @ params["b"]

    def init(key, x):
        keys = jax.random.split(key)
        return {"a": jax.random.normal(keys[0], (4, 8)) / 2, "b": jax.random.normal(keys[1], (8, 4)) / 2}

    def run(policy):
        pipe = jpipe.Pipeline(
            [jpipe.Layer(init, block)] * 4, lambda y, _: jnp.mean(y**2), num_stages=3, num_microbatches=4, remat=policy
        )
        batch = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
        variables = pipe.init(jax.random.key(0), batch)
        grads = pipe.value_and_grad(variables, batch)[1]
        return jax.tree.map(np.asarray, grads), pipe.planner.training_step(pipe.planner.for_training(batch)).kept

    saved, _ = run(jax.checkpoint_policies.save_only_these_names("hidden"))
    moved, kept = run(OFFLOADS_NAMES(names_which_can_be_offloaded=["hidden"], **NAMED))
    assert_equal(moved, saved)
    shapes = lambda kept: [[leaf.shape for leaf in one.leaves] for one in kept.away["residual_away"].record_types]
    assert shapes(kept)[1] == [(2, 8)], "what has the name, and nothing else"

    saved, _ = run(jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    moved, kept = run(jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"))
    assert_equal(moved, saved)
    assert (2, 8) in shapes(kept)[1]

    with pytest.raises(ValueError, match=r"\['other'\], but layers call checkpoint_name for \['hidden'\]"):
        run(OFFLOADS_NAMES(names_which_can_be_offloaded=["other"], **NAMED))
    with pytest.raises(ValueError, match="from 'device' to 'unpinned_host'; use 'device', 'pinned_host'"):
        run(OFFLOADS_NAMES(names_which_can_be_offloaded=["hidden"], **NAMED | {"offload_dst": "unpinned_host"}))


def plan_step(**options):
    pipe = make(**options)
    batch = {name: np.ones((8, 4), np.float32) for name in ("inputs", "targets")}
    jax.eval_shape(pipe.init, jax.random.key(0), batch)
    return pipe.planner.training_step(pipe.planner.for_training(batch))


def test_cpus_move_nothing_and_say_so_once():
    warn_once.cache_clear()
    pipe = make(remat="none", offload="residuals", num_stages=2, num_microbatches=4)
    batch = {name: np.ones((8, 4), np.float32) for name in ("inputs", "targets")}
    variables = jax.eval_shape(pipe.init, jax.random.key(0), batch)
    with pytest.warns(UserWarning, match="offload= moves nothing on CPUs") as caught:
        for _ in range(2):
            jax.eval_shape(pipe.value_and_grad, variables, batch)
    assert len(caught) == 1


def test_where_nothing_waits_it_says_so():
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="moves no residuals: under '1f1b' with num_stages=1"):
        plan_step(num_stages=1, remat="none", offload="residuals")


def test_a_share_smaller_than_any_residual_says_so():
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"offload={'residuals': 0.5} moves no residuals: each of the layers' residua"):
        plan_step(offload={"residuals": 0.5}, num_stages=2, num_microbatches=4)


def test_values_inside_of_a_jit_cannot_go():
    block = jax.jit(lambda w, x: x + checkpoint_name(jnp.tanh(x @ w), "hidden"))
    layer = jpipe.Layer(lambda key, x: jnp.ones((4, 4)), block)
    policy = OFFLOADS_NAMES(names_which_can_be_offloaded=["hidden"], **NAMED)
    loss = lambda y, _: jnp.mean(y**2)
    pipe = jpipe.Pipeline([layer] * 4, loss, num_stages=2, num_microbatches=4, remat=policy)
    with pytest.raises(ValueError, match="offloads a value inside of a jit or scan"):
        batch = np.ones((8, 4), np.float32)
        jax.eval_shape(pipe.value_and_grad, jax.eval_shape(pipe.init, jax.random.key(0), batch), batch)


@pytest.mark.filterwarnings("ignore:offload= moves nothing on CPUs")
@pytest.mark.parametrize(("share", "goes"), [(1.0, 2), (0.6, 1)])
def test_a_share_takes_the_largest_first(share, goes):
    """Of a block's two residuals, 4 and 16 wide, a share of 0.6 has room for the narrower alone."""

    def block(params, x):
        return x + jnp.tanh(x @ params["a"]) @ params["b"]

    init = lambda key, x: {"a": jnp.ones((4, 16)), "b": jnp.ones((16, 4))}
    layers = [jpipe.Layer(init, block)] * 6
    options = {
        "num_stages": 2,
        "num_microbatches": 4,
        "remat": "none",
        "balance": "even",
    }
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), offload={"residuals": share}, **options)
    batch = np.ones((8, 4), np.float32)
    jax.eval_shape(pipe.init, jax.random.key(0), batch)
    kept = pipe.planner.training_step(pipe.planner.for_training(batch)).kept
    assert kept.rows_of[1].count("residual_away") == goes


IN_PARTS = [["F0", "F1", "I0", "I1", "W0", "W1"], ["F0", "I0", "F1", "I1", "W0", "W1"]]
BATCH = np.ones((4, 4), np.float32)


def block(params, x):
    return x + jax.nn.gelu(x @ params[0]) @ params[1]


def step_of(schedule):
    init = lambda key, x: [jax.random.normal(key, shape) for shape in ((4, 8), (8, 4))]
    layers = [jnp.sin, jpipe.Layer(init, block), jpipe.Layer(init, block), jnp.cos]
    pipe = jpipe.Pipeline(
        layers,
        lambda y, _: jnp.mean(y),
        num_stages=2,
        num_microbatches=2,
        schedule=schedule,
        remat="none",
        balance="even",
    )
    jax.eval_shape(pipe.init, jax.random.key(0), BATCH)
    return pipe.planner.training_step(pipe.planner.for_training(BATCH))


def test_a_split_backward_has_rows_of_its_own():
    whole, parts = step_of("1f1b").kept, step_of(jpipe.Schedule(IN_PARTS, slots=("F", "B", "W"))).kept
    assert (list(whole.storages), whole.rows_of[1]) == (["residual"], ("residual", "residual"))
    assert (list(parts.storages), parts.rows_of[1]) == (
        ["residual", "late_residual", "w_input"],
        ("late_residual", "late_residual"),
    )
    assert [leaf.shape for leaf in parts.storages["w_input"].record_types[1].leaves] == [(2, 8), (2, 4)]


@pytest.mark.parametrize("slots", [None, ("F", "B", "W")])
def test_residuals_come_back_in_their_own_order(slots):
    kept = step_of("1f1b" if slots is None else jpipe.Schedule(IN_PARTS, slots=slots)).kept
    rows = {name: Row(0, 0) for name in kept.storages}
    leaves = [jnp.full((2, 4), 1.0), jnp.full((2, 8), 2.0)]
    written = kept.write_residuals(kept.empty(), (1, 0), leaves, rows)
    assert_equal(kept.read_residuals(written, (1, 0), rows, {}), leaves)
