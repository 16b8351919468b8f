"""Checkpoints: a run goes on as if nothing had happened, under any layout; what can't be read says so."""

import functools
import gc
import os
import re
import shutil
import signal
import warnings
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jpipe
from cases import assert_equal, cross_entropy, tokens
from jpipe.checkpoints import files
from jpipe.checkpoints.contents import Contents


@pytest.fixture
def handled():
    """The signals that a user's own handler was told of."""
    numbers = []
    before = signal.signal(signal.SIGTERM, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, before)


def test_a_signal_is_noted_and_the_users_handler_called(handled, tmp_path):
    own = signal.getsignal(signal.SIGTERM)
    with jpipe.Checkpointer(tmp_path) as saved:
        assert not saved.preempted(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert saved.preempted(1) and saved.preempted(2)
    assert handled == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is own


pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning",  # of what orbax didn't read to the end
    "ignore:Sharding info not provided",  # orbax alone
    "ignore:nothing is split over the mesh axis 'model'",
)
SAVED_STEP, STEPS = 2, 4
AXES = ("stage", "data", "model")


class Drops(nn.Module):
    """A residual block with dropout and a running average, `[B, T, 8]` to the same."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        h = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        h = nn.Dropout(0.2, deterministic=not train)(nn.Dense(8)(nn.tanh(h)))
        return x + h


def layers():
    """Embedding and head of one table, blocks with dropout and state, a function, boxed metadata."""
    table = jpipe.Shared(nn.Embed(11, 8))
    boxed = nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model")))
    return [table, Drops(), boxed, Drops(), nn.tanh, Drops(), Drops(), table.using("attend")]


def optimizer():
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
        jpipe.per_layer(optax.masked(optax.scale_by_factored_rms(), lambda p: jax.tree.map(lambda x: x.ndim > 1, p))),
        optax.scale(0.1),
        optax.ema(0.9),
    )


BATCH = tokens((16, 5))


def slow_but(names, quick):
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def pipe_of(own=None, k=4, m=4, **options):
    return jpipe.Pipeline(own or layers(), cross_entropy, num_stages=k, num_microbatches=m, **options)


@functools.cache
def first_pipe():
    """The pipeline whose run is saved."""
    return pipe_of()


def train(pipe, state, steps):
    """The state after some steps, and their losses."""
    losses = []
    for _ in range(steps):
        state, metrics = pipe.train_step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.fixture(autouse=True, scope="module")
def optax_may_promote():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run at K=4, saved in the middle: directory, losses after, each layer's variables then, the state at the end."""
    directory, pipe, tx = tmp_path_factory.mktemp("run"), first_pipe(), optimizer()
    state, _ = train(pipe, pipe.create_state(jax.random.key(3), BATCH, tx), SAVED_STEP)
    with jpipe.Checkpointer(directory) as saved:
        assert saved.restore(pipe, BATCH, tx) == (None, None)
        assert saved.latest_step is None
        saved.save(pipe, state, position={"next": 7, "state": b"\x00\xff", "shards": (1, None, [np.arange(3)])})
        then = jax.device_get(pipe.layer_variables(state.variables))
        state, losses = train(pipe, state, STEPS - SAVED_STEP)
    return directory, losses, then, on_host(state)


def on_host(state):
    """A state as NumPy arrays, its random key as data."""
    return jax.device_get(state.replace(tx=None, key=jax.random.key_data(state.key)))


def test_goes_on_bit_for_bit_under_the_same_layout(run):
    directory, losses, _, end = run
    pipe = pipe_of()
    with jpipe.Checkpointer(directory) as saved:
        assert saved.latest_step == SAVED_STEP
        state, position = saved.restore(pipe, BATCH, optimizer())
    assert position == {"next": 7, "state": b"\x00\xff", "shards": (1, None, [pytest.approx(np.arange(3))])}
    shapes = pipe.abstract_state(BATCH, optimizer())
    for leaf, shape in zip(jax.tree.leaves(state), jax.tree.leaves(shapes), strict=True):
        assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)
        assert leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim)
    state, found = train(pipe, state, STEPS - SAVED_STEP)
    assert found == losses
    assert_equal(on_host(state), end)


OTHER_LAYOUTS: dict[str, dict] = {
    "interleaved with data": {"k": 2, "num_chunks": 2, "schedule": "interleaved", "remat": "none", "mesh": (2, 2)},
    "ends spread": {"k": 2, "ends": "spread", "shard_over": ("data",), "mesh": (2, 2)},
    "explicit, weights split": {"k": 2, "schedule": "gpipe", "mesh": (2, 2, 2), "shard_over": ("data",)},
}


@pytest.mark.parametrize("case", slow_but(OTHER_LAYOUTS, quick=("interleaved with data",)))
def test_goes_on_with_the_same_losses_under_another_layout(run, make_mesh, case, monkeypatch):
    directory, losses, then, _ = run
    monkeypatch.setattr("jpipe.memory.layout.SMALLEST", 1)
    options = dict(OTHER_LAYOUTS[case])
    if shape := options.pop("mesh", None):
        options["mesh"] = make_mesh(shape, AXES[: len(shape)], explicit="explicit" in case)
    pipe = pipe_of(**options)
    with jpipe.Checkpointer(directory) as saved:
        state, _ = saved.restore(pipe, BATCH, optimizer())
    assert_equal(jax.device_get(pipe.layer_variables(state.variables)), then)
    _, found = train(pipe, state, STEPS - SAVED_STEP)
    np.testing.assert_allclose(found, losses, rtol=1e-6)


def test_each_layers_own_tree_is_read_without_a_pipeline(run, monkeypatch):
    directory, _, then, _ = run
    plain = nn.meta.unbox(then)
    assert_equal(jpipe.load_layers(directory), plain)
    monkeypatch.chdir(directory.parent)
    assert_equal(jpipe.load_layers(directory.name, step=SAVED_STEP), plain)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 7, but of \[2\]; pass the folder"):
        jpipe.load_layers(directory, step=7)
    with pytest.raises(FileNotFoundError, match=r"nothing has no checkpoint; pass the folder of a jpipe\.Checkpointer"):
        jpipe.load_layers(directory / "nothing")


NAMES = {"a/b": jnp.ones(4), "a": {"c": jnp.zeros(4)}}
ITSELF = optax.GradientTransformation(lambda params: jnp.zeros(()), lambda g, s, params=None: (g, s + 1))
"""An optimiser whose state is an array."""


@pytest.mark.parametrize(
    "layer",
    [
        jpipe.Layer(lambda key, x: NAMES, lambda p, x: x * p["a/b"] + p["a"]["c"]),
        lambda rngs: nnx.Linear(4, 4, rngs=rngs),
    ],
    ids=["names with slashes", "nnx"],
)
def test_variables_of_all_kinds_come_back(tmp_path, layer):
    pipe, state = small(ITSELF, layer)
    state = state.replace(opt_state=jnp.float32(3))
    with jpipe.Checkpointer(tmp_path) as saved:
        saved.save(pipe, state)
        found, _ = saved.restore(pipe, SMALL, ITSELF)
    assert float(found.opt_state) == 3
    expected = jax.device_get(pipe.layer_variables(state.variables))
    assert_equal(jpipe.load_layers(tmp_path), expected)
    assert_equal(jax.device_get(pipe.layer_variables(found.variables)), expected)


def test_orbax_alone_reads_a_checkpoint(run):
    directory, _, then, _ = run
    found = ocp.PyTreeCheckpointer().restore(directory / str(SAVED_STEP) / "layers")
    names = ["0000_Embed", "0001_Drops", "0002_Dense", "0003_Drops", "0005_Drops", "0006_Drops"]
    assert sorted(found) == names, "the function has no variables, and the head those of the embedding"
    assert_equal(jax.device_get(found["0003_Drops"]), then[3])


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "adamw in bfloat16": lambda: optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
    "schedule and hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1.0, 0.0, 9)),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 3), optax.sgd(0.1, momentum=0.9)),
    "factored by layer": lambda: jpipe.per_layer(optax.adafactor(1e-3, min_dim_size_to_factor=4)),
}


@pytest.mark.parametrize("name", slow_but(OPTIMIZERS, quick=("factored by layer",)))
def test_any_optimisers_state_to_another_layout_and_back(tmp_path, name):
    tx, key = OPTIMIZERS[name](), jax.random.key(1)
    pipe, other = pipe_of(balance="even"), pipe_of(k=2, num_chunks=2, schedule="interleaved", balance="even")
    state = pipe.create_state(key, BATCH, tx)
    rng = np.random.default_rng(0)

    def random(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        values = rng.standard_normal(leaf.shape).astype(leaf.dtype) if leaf.dtype != bool else leaf
        return jax.device_put(values, leaf.sharding)

    state = state.replace(opt_state=jax.tree.map(random, state.opt_state))
    with jpipe.Checkpointer(tmp_path / "one") as one, jpipe.Checkpointer(tmp_path / "two") as two:
        one.save(pipe, state)
        middle, _ = one.restore(other, BATCH, tx)
        two.save(other, middle)
        end, _ = two.restore(pipe, BATCH, tx)
        one.save(pipe, end.replace(step=end.step + 1))
    about = [files.read_about(tmp_path / folder) for folder in ("one/0", "two/0", "one/1")]
    assert about[0]["arrays"] == about[1]["arrays"] == about[2]["arrays"]
    shapes = files.shapes_in(about[0])
    first, second, third = (files.read_arrays(tmp_path / folder, shapes) for folder in ("one/0", "two/0", "one/1"))
    assert_equal(second, first)
    assert_equal(third, first)
    assert about[0]["random_keys"] == about[1]["random_keys"] == about[2]["random_keys"]
    assert name == "sgd" or any(path[0] == "optimizer" for path in shapes)


def test_no_device_gets_more_than_its_share_of_a_layer():
    own = [nn.Dense(64, name=f"dense{i}") for i in range(8)]
    batch = {"inputs": np.zeros((4, 64), np.float32)}
    pipe = jpipe.Pipeline(own, lambda y, _: jnp.mean(y), num_stages=4, num_microbatches=2, balance="even")
    state = pipe.create_state(jax.random.key(0), batch, optax.adam(1e-3))
    contents = Contents(pipe.plan.model, state)
    records, arrays = contents.records, contents.arrays
    model_bytes = 64 * 65 * 4 * len(own) * 3  # parameters and two moments
    taken = jax.jit(lambda arrays: records.take(arrays, 1, 3)).lower(arrays).compile().memory_analysis()
    parts = records.take(arrays, 1, 3)
    for leaf in jax.tree.leaves(parts):
        assert leaf.addressable_shards[0].data.size == leaf.size // 4
    written = records._put(frozenset()).lower(arrays, 1, parts, np.int32(3)).compile()
    for analysis in (taken, written.memory_analysis()):
        one_layer = model_bytes / len(own)
        assert analysis.temp_size_in_bytes <= 2 * one_layer + 64, "one layer, what it replaces, and some scalars"


# --- what can't be read -----------------------------------------------------------------------------------------------


@pytest.fixture
def two_steps(run, tmp_path):
    """A copy of the run's directory with a second checkpoint."""
    directory = tmp_path / "copy"
    shutil.copytree(run[0], directory)
    with jpipe.Checkpointer(directory) as saved:
        state, _ = saved.restore(first_pipe(), BATCH, optimizer())
        saved.save(first_pipe(), state.replace(step=state.step + 3), position="second")
    yield directory
    gc.collect()  # what orbax didn't read to the end complains when it is collected: here, not in another test


def damage(path: Path, how: str) -> None:
    if how == "delete":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_a_damaged_checkpoint_is_passed_over_and_set_aside(two_steps):
    newest = two_steps / str(SAVED_STEP + 3)
    for path in (newest / "layers" / "d").iterdir():
        damage(path, "delete")
    pipe = first_pipe()
    with jpipe.Checkpointer(two_steps) as saved:
        with pytest.warns(UserWarning, match=rf"going on from step {SAVED_STEP}, since step {SAVED_STEP + 3}: layers:"):
            state, _ = saved.restore(pipe, BATCH, optimizer())
        assert int(state.step) == SAVED_STEP
        saved.save(pipe, state.replace(step=state.step + 3), position="again")
    assert (two_steps / f"damaged-{SAVED_STEP + 3}").exists()
    with jpipe.Checkpointer(two_steps) as saved:
        state, position = saved.restore(pipe, BATCH, optimizer())
    assert (int(state.step), position) == (SAVED_STEP + 3, "again")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["delete", "truncate"])
def test_whatever_file_is_damaged_the_state_is_exact_or_an_older_one(two_steps, tmp_path, how):
    newest, tx = two_steps / str(SAVED_STEP + 3), optimizer()
    names = [path.relative_to(newest) for path in newest.rglob("*") if path.is_file()]
    pipe = pipe_of(balance="even")
    with jpipe.Checkpointer(two_steps) as saved:
        expected = on_host(saved.restore(pipe, BATCH, tx)[0]).replace(step=None)
    steps = set()
    for number, name in enumerate(names):
        directory = tmp_path / str(number)
        shutil.copytree(two_steps, directory)
        damage(directory / newest.name / name, how)
        with jpipe.Checkpointer(directory) as saved, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state, position = saved.restore(pipe, BATCH, tx)
        assert (int(state.step), position == "second") in ((SAVED_STEP + 3, True), (SAVED_STEP, False)), name
        assert_equal(on_host(state).replace(step=None), expected, str(name))
        steps.add(int(state.step))
    assert steps == {SAVED_STEP, SAVED_STEP + 3}


def test_if_none_can_be_read_it_says_why(two_steps):
    shutil.rmtree(two_steps / str(SAVED_STEP) / "about")
    for path in (two_steps / str(SAVED_STEP + 3) / "layers").rglob("manifest.ocdbt"):
        path.unlink()
    why = r"no checkpoint in .* can be read: .*step 5: layers: .*step 2: it has no item 'about'"
    with jpipe.Checkpointer(two_steps) as saved, pytest.raises(RuntimeError, match=why):
        saved.restore(first_pipe(), BATCH, optimizer())
    with pytest.raises(RuntimeError, match=why[:36]):
        jpipe.load_layers(two_steps)


def test_a_foreign_checkpoint(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.StandardSave({"x": np.zeros(3)}))
    foreign = pytest.raises(RuntimeError, match=r"not written by jpipe\.Checkpointer")
    with jpipe.Checkpointer(tmp_path) as saved, foreign:
        saved.restore(small()[0], SMALL, optax.sgd(0.1))


def untied(own):
    return [nn.Embed(11, 8), *own[1:-1], jpipe.Shared(nn.Embed(11, 8)).using("attend")]


OTHER_MODELS = {
    r"layer 7 is 0007_Embed in the checkpoint and 0007_D": lambda own: [*own[:-1], nn.Dense(8), own[-1]],
    r"layers/0002_Dense/params/bias is float32\[8\] in the checkpoint and missing in the pipeline": (
        lambda own: [*own[:2], nn.Dense(8, use_bias=False), *own[3:]]
    ),
    r"the layer that stores the variables of layer 7 is 0000_Embed in the checkpoint and 0007_Embed": untied,
    r"optimizer/0/count is missing in the checkpoint and int32\[\] in the pipeline": list,
}


@pytest.mark.parametrize("message", OTHER_MODELS)
def test_the_first_difference_is_named(run, message):
    tx = optax.adam(1e-3) if message.startswith("optimizer") else optimizer()
    pipe = pipe_of(OTHER_MODELS[message](layers()), balance="even")
    with jpipe.Checkpointer(run[0]) as saved, pytest.raises(ValueError, match=message):
        saved.restore(pipe, BATCH, tx)


# --- misuse -----------------------------------------------------------------------------------------------------------


def test_the_same_step_twice_is_saved_once_and_old_ones_are_deleted(tmp_path):
    pipe, state = small()
    with jpipe.Checkpointer(tmp_path, keep=2) as saved:
        for step in (0, 0, 1, 2, 2):
            saved.save(pipe, state.replace(step=jnp.int32(step)))
        saved.wait()
        assert saved.latest_step == 2
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["1", "2"]


def small(tx=None, layer=None, count=2):
    """A pipeline of some small layers and its state."""
    layers = [layer or nn.Dense(4)] * count
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=2, num_microbatches=1)
    return pipe, pipe.create_state(jax.random.key(0), SMALL, tx or optax.sgd(0.1))


def donated(state):
    jax.tree.map(lambda leaf: leaf.delete(), state.variables)
    return state


def saved_ahead(saved, pipe, state):
    saved.save(pipe, state.replace(step=jnp.int32(2)))
    saved.wait()
    return state


CONFUSING = jpipe.Layer(lambda key, x: {"a.b": jnp.ones(4), "a": {"b": jnp.zeros(4)}}, lambda p, x: x * p["a.b"])
FOLLOWING = optax.GradientTransformation(
    lambda params: [jnp.zeros_like(leaf) for leaf in jax.tree.leaves(params)], lambda g, s, params=None: (g, s)
)
MISUSE = [
    (lambda saved, pipe, state: saved.restore(None, SMALL, None), "pipe is a NoneType; pass a jpipe.Pipeline"),
    (lambda saved, pipe, state: saved.save(pipe, state.variables), "state is a dict; make it with pipe.create_state"),
    (lambda saved, pipe, state: saved.save(pipe, state, position={(1, 2): 3}), "the key (1, 2); use strings"),
    (lambda saved, pipe, state: saved.save(pipe, state, position={"r": [object()]}), "holds a object at r/0"),
    (lambda saved, pipe, state: saved.save(pipe, donated(state)), "donated"),
    (lambda saved, pipe, state: saved.save(small(count=3)[0], state), "another pipeline"),
    (lambda saved, pipe, state: saved.save(*small(layer=CONFUSING)), "two arrays would be called "),
    (lambda saved, pipe, state: saved.save(*small(FOLLOWING)), "follows the pipeline's buffers"),
    (lambda saved, pipe, state: saved.save(pipe, saved_ahead(saved, pipe, state)),
     "holds step 2, and the state is of step 0; restore it, or save elsewhere"),
    (lambda saved, pipe, state: jpipe.Checkpointer(""), "the directory's name is empty"),
    (lambda saved, pipe, state: jpipe.Checkpointer("file/run"), "choose another directory"),
]  # fmt: skip
"""Calls with a checkpointer, a pipeline and its state; and words of what they raise."""


@pytest.mark.parametrize(("call", "words"), MISUSE, ids=lambda part: part if isinstance(part, str) else "")
def test_misuse_is_told_with_the_remedy(tmp_path, monkeypatch, call, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    told = pytest.raises((TypeError, ValueError, OSError), match=re.escape(words))
    with jpipe.Checkpointer(tmp_path / "run") as saved, told:
        call(saved, *small())


SMALL = np.ones((2, 4), np.float32)


def test_it_is_used_within_its_with(tmp_path):
    pipe, state = small()
    with jpipe.Checkpointer(tmp_path) as saved:
        saved.save(pipe, state)
    for call in (lambda: saved.save(pipe, state), lambda: saved.restore(pipe, SMALL, optax.sgd(0.1))):
        with pytest.raises(RuntimeError, match="is closed; use it within its `with`"):
            call()
    saved.close()
