"""A checkpoint goes on with other parameters frozen: as an optax run whose moments are kept, begun anew or dropped."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.core import meta
from flax.traverse_util import flatten_dict

import jpipe
from cases import assert_close

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
