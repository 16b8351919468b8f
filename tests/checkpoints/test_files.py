"""Files: what orbax writes and reads for us, some arrays at a time, and what can't be read."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.core import meta
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, PartitionSpec

import jpipe
from cases import assert_close, assert_equal
from jpipe.checkpoints import files
from jpipe.checkpoints.contents import AT_ONCE, Contents
from jpipe.checkpoints.files import Origin, read_all, take_all

NAMED = {
    ("layers", "0000_Dense", "params", "a/b"): jnp.arange(8, dtype=jnp.bfloat16),
    ("layers", "0000_Dense", "params", "none"): jnp.zeros((0, 3)),
    ("layers", "0001_Dense", "params", "kernel"): jnp.arange(6.0).reshape(2, 3),
    ("optimizer", "0", "count"): jnp.int32(7),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A directory with step 3, and what it says of itself."""
    directory = files.as_path(tmp_path_factory.mktemp("run"))
    about = {"arrays": [[list(path), a.dtype.name, list(a.shape)] for path, a in NAMED.items()]}
    manager = files.make_manager(directory, keep=None)
    files.write(manager, 3, NAMED, about)
    manager.close()
    return directory / "3", about


def test_what_is_written_is_read_on_the_host_or_split(written, make_mesh):
    directory, about = written
    assert files.read_about(directory) == {"format": 1, **about}
    shapes = files.shapes_in(about)
    found = files.read_arrays(directory, shapes)
    assert all(isinstance(array, np.ndarray) for array in found.values())
    assert_equal(found, jax.device_get(NAMED))
    path, split = (
        ("layers", "0001_Dense", "params", "kernel"),
        NamedSharding(make_mesh((2,), ("stage",)), PartitionSpec("stage")),
    )
    some = files.read_arrays(directory, {path: shapes[path].update(sharding=split)})
    assert set(some) == {path}, "the others aren't read"
    assert some[path].sharding == split
    assert_equal(some[path], NAMED[path])


def test_what_is_not_there_is_damaged(written, tmp_path):
    directory, about = written
    with pytest.raises(files.DamagedError, match="no item 'about'"):
        files.read_about(files.as_path(tmp_path))
    with pytest.raises(files.DamagedError, match=r"^layers: "):
        files.read_arrays(directory.parent / "4", files.shapes_in(about))
    missing = {("layers", "0001_Dense", "params", "bias"): jax.ShapeDtypeStruct((3,), jnp.float32)}
    with pytest.raises(files.DamagedError, match=r"^layers: KeyError: '0001_Dense/params/bias'"):
        files.read_arrays(directory, files.shapes_in(about) | missing)  # orbax gave the shape itself back


def test_a_newer_format_is_no_damage(tmp_path):
    (tmp_path / "about").mkdir()
    (tmp_path / "about" / "metadata").write_text(json.dumps({"format": 3}))
    with pytest.raises(ValueError, match=r"has the format .* reads up to .* use a newer jpipe"):
        files.read_about(files.as_path(tmp_path))


def test_steps_the_newest_first_and_those_set_aside_no_more(tmp_path):
    directory = files.as_path(tmp_path)
    for name in ("1", "20", "3", "damaged-3", "3.orbax-checkpoint-tmp-7", "other"):
        (directory / name).mkdir()
    assert files.steps_in(directory) == [20, 3, 1]
    files.set_aside(directory, [3, 20])
    assert files.steps_in(directory) == [1]
    assert (directory / "damaged-3-1").is_dir() and (directory / "damaged-20").is_dir()
    assert files.listed(directory / "nowhere") == []


@pytest.mark.parametrize("error", [files.DamagedError("here"), KeyError("here")])
def test_what_work_raises_is_raised_here(error):
    def work():
        raise error

    with pytest.raises(type(error), match="here"):
        files.if_all_can(work)
    assert files.if_all_can(lambda: None) is None


def test_directories():
    assert str(files.as_path("gs://bucket/run")) == "gs://bucket/run"
    assert files.as_path("run").is_absolute()
    with pytest.raises(ValueError, match="name is empty"):
        files.as_path("")


# --- refreezing -------------------------------------------------------------------------------------------------------


pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning",  # of what orbax didn't read to the end
    "ignore:Sharding info not provided",  # orbax alone
    "ignore:nothing is split over the mesh axis",
)
WIDE = jnp.float64
RNG = np.random.default_rng(0)
BATCH = {"inputs": RNG.standard_normal((4, 6)), "targets": RNG.standard_normal((4, 6))}
BOXED = nn.Dense(6, param_dtype=WIDE, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "tp")))
LAYERS = [nn.Dense(6, param_dtype=WIDE), nn.Dense(6, param_dtype=WIDE), BOXED, nn.Dense(6, param_dtype=WIDE)]
BEFORE = [("kernel", "bias"), ("kernel",), (), ()]
AFTER = [(), ("bias",), ("kernel", "bias"), ()]


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def loss_fn(y, batch):
    return jnp.mean((jnp.tanh(y) - batch["targets"]) ** 2)


def pipe_of(frozen, k=2, layers=LAYERS, **options):
    """A pipeline whose layers have parameters of these names frozen."""
    own = [
        jpipe.freeze(layer, lambda path, names=names: path.split("/")[-1] in names) if names else layer
        for layer, names in zip(layers, frozen, strict=True)
    ]
    return jpipe.Pipeline(own, loss_fn, num_stages=k, num_microbatches=2, balance="even", **options)


def is_matrix(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


OPTIMIZERS = {
    "adamw": (lambda: optax.adamw(1e-2), lambda: optax.adamw(1e-2)),
    "masked, by layer": (
        lambda: optax.chain(
            optax.clip_by_global_norm(0.1), jpipe.per_layer(optax.adamw(1e-2, weight_decay=0.1, mask=is_matrix))
        ),
        lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.1, mask=is_matrix)),
    ),
    "values of parameters": (  # its z begins as the parameters
        lambda: optax.contrib.schedule_free_adamw(1e-2),
        lambda: optax.contrib.schedule_free_adamw(1e-2),
    ),
}


def plain_loss(trained, kept):
    """The plain model's loss, of parameters by (layer, name)."""
    x, params = BATCH["inputs"], trained | kept
    for i, layer in enumerate(LAYERS):
        x = layer.apply({"params": {name: params[i, name] for name in ("kernel", "bias")}}, x)
    return loss_fn(x, BATCH)


def plain_steps(tx, params, state, frozen, steps):
    """(all parameters, the optimiser's state) after some steps of plain JAX and optax."""
    kept = {(i, name): params[i, name] for i, names in enumerate(frozen) for name in names}
    trained = {place: leaf for place, leaf in params.items() if place not in kept}
    start = jax.jit(tx.init)(trained)
    state = start if state is None else state(start)

    @jax.jit  # as one program: its operations one by one would be compiled one by one
    def step(trained, state):
        changes, state = tx.update(jax.grad(plain_loss)(trained, kept), state, trained)
        return optax.apply_updates(trained, changes), state

    for _ in range(steps):
        trained, state = step(trained, state)
    return trained | kept, state


def carried_on(old):
    """From a new state to one that has all that is in `old` too: a moment's by (layer, name), a number by its path."""
    known = dict(jax.tree_util.tree_leaves_with_path(old))
    return lambda new: jax.tree_util.tree_map_with_path(lambda path, leaf: known.get(path, leaf), new)


def parameters(pipe, variables):
    trees = meta.unbox(jax.device_get(pipe.layer_variables(variables)))
    return {(i, name): leaf for i, tree in enumerate(trees) for name, leaf in tree["params"].items()}


def by_name(path, leaf):
    """A name for each of a plain state's leaves: of a moment `("mu", 0, "kernel")`, of a number `("count",)`."""
    *rest, last = path
    place = last.key if isinstance(last, jax.tree_util.DictKey) and isinstance(last.key, tuple) else None
    field = rest[-1] if place else last
    return ((field.name, *place) if place else (field.name,)), leaf


def saved_state(directory):
    """The optimiser's state in the newest checkpoint, read by orbax alone: named as `by_name` does."""
    newest = max((d for d in directory.iterdir() if d.name.isdigit()), key=lambda d: int(d.name))
    found = {}
    for path, leaf in flatten_dict(ocp.PyTreeCheckpointer().restore(newest / "optimizer")).items():
        path = tuple(name for name in path if name != "value")
        layer = next((name for name in path if name.endswith("_Dense")), None)
        fields = [name for name in path if name in ("mu", "nu", "z")]
        name = (fields[0], int(layer[:4]), path[-1]) if fields else (path[-1],)
        assert name not in found or np.array_equal(found[name], leaf), name  # numbers of each layer
        found[name] = leaf
    return found


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adamw", {"k": 4}),
        ("masked, by layer", {"k": 2, "num_chunks": 2, "schedule": "interleaved"}),
        pytest.param("adamw", {"k": 2, "ends": "spread"}, marks=pytest.mark.slow),
        ("values of parameters", {"k": 1}),
    ],
)
def test_training_goes_on_as_a_plain_run_does(tmp_path, name, options):
    ours, plain = OPTIMIZERS[name]
    first, tx = pipe_of(BEFORE), ours()
    state = first.create_state(jax.random.key(3), BATCH, tx)
    begun = parameters(first, state.variables)
    for _ in range(2):
        state, _ = first.train_step(state, BATCH)
    key = jax.random.key_data(state.key)
    with jpipe.Checkpointer(tmp_path) as saved:
        saved.save(first, state, position=5)
    wanted, old = plain_steps(plain(), begun, None, BEFORE, 2)

    other = pipe_of(AFTER, **options)
    with jpipe.Checkpointer(tmp_path) as saved:
        state, position = saved.restore(other, BATCH, tx)
        assert (int(state.step), position) == (2, 5)
        assert np.array_equal(jax.random.key_data(state.key), key)
        assert_close(parameters(other, state.variables), wanted, "what was trained before")
        saved.save(other, state.replace(step=state.step + 1))  # the moments as they begin
    _, begins = plain_steps(plain(), wanted, carried_on(old), AFTER, 0)
    moments = dict(by_name(*found) for found in jax.tree_util.tree_leaves_with_path(begins))
    assert {(0, "kernel"), (1, "kernel"), (3, "bias")} <= {place[1:] for place in moments}
    assert_close(saved_state(tmp_path), moments, "each moment")
    for _ in range(3):
        state, _ = other.train_step(state, BATCH)
    wanted, _ = plain_steps(plain(), wanted, carried_on(old), AFTER, 3)
    assert int(state.step) == 5
    assert_close(parameters(other, state.variables), wanted, "what was trained after")


def test_what_several_places_share(tmp_path):
    """Of a shared layer too, and from frozen to trained alone: then nothing of the optimiser is dropped."""
    shared = lambda freeze: jpipe.Shared(freeze(LAYERS[0]))
    pipes = []
    for tied in (shared(jpipe.freeze), shared(lambda layer: layer)):
        layers = [tied, LAYERS[1], tied]
        pipes.append(jpipe.Pipeline(layers, loss_fn, num_stages=len(pipes) + 1, num_microbatches=2, balance="even"))
    tx = optax.adam(1e-2)
    state, _ = pipes[0].train_step(pipes[0].create_state(jax.random.key(0), BATCH, tx), BATCH)
    trees = jax.device_get(pipes[0].layer_variables(state.variables))
    with jpipe.Checkpointer(tmp_path) as saved:
        saved.save(pipes[0], state)
        found, _ = saved.restore(pipes[1], BATCH, tx)
    assert_close(jax.device_get(pipes[1].layer_variables(found.variables)), trees, "values")
    moments = jax.device_get(pipes[1].layer_variables({"params": found.opt_state[0].mu}))
    before = jax.device_get(pipes[0].layer_variables({"params": state.opt_state[0].mu}))
    assert_close(moments[1], before[1], "what stays trained")
    assert not any(leaf.any() for leaf in jax.tree.leaves(moments[0]))
    assert int(found.opt_state[0].count) == 1


@pytest.mark.parametrize("wrap", [lambda tx: tx, jpipe.per_layer], ids=["all", "by layer"])
def test_a_layer_that_is_one_array(tmp_path, wrap):
    """Its moments have no name of their own."""
    scale = jpipe.Layer(lambda key, x: jnp.full(6, 2.0), lambda p, x: x * p)
    first, second = (pipe_of(names, layers=[scale, scale, LAYERS[0]]) for names in ([("",), (), ()], [(), ("",), ()]))
    tx = wrap(optax.adam(1e-2))
    state, _ = first.train_step(first.create_state(jax.random.key(0), BATCH, tx), BATCH)
    trees = jax.device_get(first.layer_variables(state.variables))
    with jpipe.Checkpointer(tmp_path) as saved:
        saved.save(first, state)
        found, _ = saved.restore(second, BATCH, tx)
        assert_close(jax.device_get(second.layer_variables(found.variables)), trees, "values")
        saved.save(second, found.replace(step=found.step + 1))
    arrays = flatten_dict(ocp.PyTreeCheckpointer().restore(tmp_path / "2" / "optimizer"))
    layers = {name: leaf for path, leaf in arrays.items() if "mu" in path for name in path if name.endswith("_Layer")}
    assert list(layers) == ["0000_Layer"] and not layers["0000_Layer"].any()


def listed():
    """A transformation that keeps numbers in a list, without the parameters' names."""
    init = lambda params: [jnp.zeros(leaf.shape) for leaf in jax.tree.leaves(params)]
    return optax.GradientTransformation(init, lambda g, s, params=None: (g, s))


def in_one(swapped=False):
    """All of a layer's parameters in one vector, as long before as after."""
    layer = jpipe.Layer(lambda key, x: {"a": jnp.ones(6), "b": jnp.zeros(6)}, lambda p, x: x * p["a"] + p["b"])
    return pipe_of([("b",) if swapped else ("a",), ()], layers=[layer, LAYERS[0]])


@pytest.mark.parametrize(
    ("tx", "first", "second", "name"),
    [
        (listed, lambda: pipe_of(BEFORE), lambda: pipe_of(AFTER), r"state/000\d_Dense/0"),
        (listed, lambda: in_one(), lambda: in_one(swapped=True), "state/0000_Layer/0"),
        (lambda: optax.flatten(optax.adam(0.1)), in_one, lambda: in_one(swapped=True), "state/0000_Layer/0/mu"),
    ],
    ids=["other counts", "a list", "a vector"],
)
def test_what_has_no_names_is_refused(tmp_path, tx, first, second, name):
    """Also where as many numbers are trained as before."""
    pipe, tx = first(), jpipe.per_layer(tx())
    with jpipe.Checkpointer(tmp_path) as saved:
        saved.save(pipe, pipe.create_state(jax.random.key(0), BATCH, tx))
        with pytest.raises(ValueError, match=rf"optimizer/{name} belongs to no single parameter by its name"):
            saved.restore(second(), BATCH, tx)


def test_other_layers_and_optimisers_are_refused_as_ever(tmp_path):
    first, tx = pipe_of(BEFORE), optax.adam(1e-2)
    with jpipe.Checkpointer(tmp_path) as saved:
        saved.save(first, first.create_state(jax.random.key(0), BATCH, tx))
        with pytest.raises(ValueError, match=r"optimizer/0/trace/0001_Dense/kernel is missing|optimizer/0/count is"):
            saved.restore(pipe_of(AFTER), BATCH, optax.sgd(1e-2, momentum=0.9))
        narrow = [nn.Dense(6, param_dtype=WIDE, use_bias=False), *LAYERS[1:]]
        with pytest.raises(ValueError, match=r"layers/0000_Dense/\w+/bias is float64\[6\] in the checkpoint and missi"):
            saved.restore(pipe_of([("kernel",), *AFTER[1:]], layers=narrow), BATCH, tx)


# --- transfer ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def state():
    """A pipeline of sixteen equal layers and its state."""
    batch = np.ones((4, 8), np.float32)
    layers = [nn.Dense(8) for _ in range(16)]
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=4, num_microbatches=2, balance="even")
    return pipe, batch, pipe.create_state(jax.random.key(0), batch, optax.adam(1e-3, mu_dtype=jnp.bfloat16))


def test_portions_are_of_an_eighth_and_all_of_it(state):
    pipe, _, own = state
    contents = Contents(pipe.plan.model, own)
    portions = contents.portions()
    found = [record for portion in portions for record in portion]
    assert [record.shapes for record in found] == [record.shapes for record in contents.each_record]
    assert [len(portion) for portion in portions] == [2] * 8
    assert all(sum(r.num_bytes for r in portion) <= AT_ONCE * contents.num_bytes for portion in portions)


def test_what_is_taken_and_written_is_read_into_the_same_state(state, tmp_path):
    pipe, batch, own = state
    contents, told = Contents(pipe.plan.model, own), []
    named = take_all(contents, told.append)
    assert sum(told) == contents.num_bytes
    assert set(named) == set(contents.shapes())
    directory = files.as_path(tmp_path)
    manager = files.make_manager(directory, keep=None)
    files.write(manager, 0, named, contents.description())
    manager.close()
    shapes = Contents(pipe.plan.model, pipe.abstract_state(batch, own.tx))
    arrays, named = read_all(directory / "0", shapes, Origin({}, set(), {}))
    found = shapes.filled(arrays, named | {("step",): own.step, ("key",): own.key})
    assert_equal(found.variables, own.variables)
    assert_equal(found.opt_state, own.opt_state)
    for leaf, want in zip(jax.tree.leaves(found), jax.tree.leaves(shapes.state), strict=True):
        assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim)
