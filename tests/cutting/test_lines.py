"""What blocks give to the model's outputs leaves them equal, and is the plain model's: sown values, regularisers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from cases import assert_close
from jpipe.processes.progress import warn_once

X = np.random.default_rng(0).normal(size=(8, 5))
Dense = lambda width, **options: nn.Dense(width, param_dtype=jnp.float64, **options)


pytestmark = [
    pytest.mark.filterwarnings(r"ignore:self.sow\(.intermediates"),
    pytest.mark.filterwarnings("ignore:layers .* look at several examples"),
]


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


class Block(nn.Module):
    """A block that sows a scalar of its values, one of its parameters alone, and a count for each of three experts."""

    in_training_alone: bool = False

    @nn.compact
    def __call__(self, x, train=True):
        y = jnp.tanh(Dense(6, name="own")(x))
        share = jax.nn.softmax(y[:, :3])
        if train or not self.in_training_alone:
            self.sow("losses", "balance", jnp.sum(jnp.mean(share, 0) ** 2))
            self.sow("losses", "l2", jnp.sum(self.variables["params"]["own"]["kernel"] ** 2))
            self.sow("intermediates", "counts", jnp.sum(share, 0))
        return x + y


class Sows(nn.Module):
    """Blocks one by one, or by a scan."""

    scanned: bool = False
    in_training_alone: bool = False

    @nn.compact
    def __call__(self, x, train=False):
        x = Dense(6, name="front")(x)
        if self.scanned:
            axes = dict.fromkeys(("params", "losses", "intermediates"), 0)
            call = nn.scan(lambda block, x, _: (block(x), None), axes, split_rngs={"params": True}, length=4)
            x, _ = call(Block(name="blocks"), x, None)
        else:
            for i in range(4):
                x = Block(self.in_training_alone, name=f"block_{i}")(x, train)
        return Dense(2, name="head")(x)


AT_END = {
    "sum": lambda values: 0.3 * sum(values),
    "mean": lambda values: jnp.mean(jnp.stack(values)),
    "array": lambda values: jnp.sum(jnp.array(values)),
    "rows": lambda values: jnp.sum(jnp.concatenate([value[None] for value in values])),
    "stack": jnp.stack,
}


class Regularised(nn.Module):
    """A regulariser, and a value of each block, that the model adds up at its end, or block by block.

    Or the regulariser alone, in training alone.
    """

    at_end: tuple[str, ...] = ()
    in_training_alone: bool = False

    @nn.compact
    def __call__(self, x, train=False):
        x, squares, own = Dense(6, name="front")(x), [], jnp.zeros(())
        for i in range(4):
            dense = Dense(6, name=f"block_{i}")
            y = jnp.tanh(dense(x))
            squares.append(jnp.sum(dense.variables["params"]["kernel"] ** 2))
            if not self.in_training_alone:
                own = own + jnp.mean(y**2)
            if not self.at_end and (train or not self.in_training_alone):
                own = own + squares[-1]
            x = x + y
        return Dense(2, name="head")(x), [own, *(AT_END[way](squares) for way in self.at_end)] if self.at_end else own


def loss(outputs, batch):
    """Of outputs and all that comes with them."""
    y, rest = outputs
    return jnp.mean(y**2) + 0.1 * sum(jnp.sum(leaf) for leaf in jax.tree.leaves(rest))


def check(model, sown, num_stages, num_microbatches, **options):
    """Loss, gradients, evaluation and outputs are those of the plain model; returns the pipeline."""
    tree = model.init(jax.random.key(0), X)
    options |= {"num_stages": num_stages, "num_microbatches": num_microbatches, "loss_over": "microbatch"}
    pipe = jpipe.Pipeline(model, loss, sown=sown, **options)
    variables, rows = pipe.from_model_variables(tree, {"inputs": X}), np.split(X, num_microbatches)
    mutable = {"mutable": list(sown)} if sown else {}

    def plain(params, train=True):
        outputs = [model.apply({"params": params}, x, train, **mutable) for x in rows]
        return sum(loss(one, None) for one in outputs) / num_microbatches

    (value, _), gradients = pipe.value_and_grad(variables, {"inputs": X})
    assert_close(
        (value, pipe.model_variables({"params": gradients})["params"]), jax.value_and_grad(plain)(tree["params"])
    )
    assert_close(pipe.evaluate(variables, {"inputs": X}), plain(tree["params"], False))
    return pipe, variables, tree


def functions_of_blocks(pipe):
    assert len(pipe.plan.layers) == 6
    groups = zip(pipe.plan.model.group_of, pipe.plan.layers, strict=True)
    return [own for own, layer in groups if "block" in layer.name]


SUMS = ("sum", "mean")


@pytest.mark.parametrize(
    ("model", "sown", "sizes"),
    [
        (Sows(scanned=True), ("losses",), (2, 2)),
        (Sows(in_training_alone=True), ("losses", "intermediates"), (2, 2)),
        *((Regularised(ways), (), (2, 2)) for ways in (SUMS, ("array", "stack", "rows"))),
        (Regularised(in_training_alone=True), (), (4, 4)),
        *(
            pytest.param(model, sown, sizes, marks=pytest.mark.slow)
            for sizes in [(2, 1), (4, 4), (3, 2)]
            for model, sown in [
                (Sows(), ("losses", "intermediates")),
                (Sows(scanned=True), ("losses", "intermediates")),
                (Regularised(("sum",)), ()),
                (Regularised(("mean",)), ()),
                (Regularised(("rows",)), ()),
                (Regularised(), ()),
            ]
        ),
    ],
)
def test_blocks_stay_one_function_and_give_what_the_plain_model_gives(model, sown, sizes):
    pipe, *_ = check(model, sown, *sizes)
    functions = functions_of_blocks(pipe)
    # What is done with the sum itself is part of the last block.
    assert len({*functions[: 3 if {*getattr(model, "at_end", ())} & {*SUMS} else 4]}) == 1, functions


def test_apply_gives_sown_values_of_the_whole_batch():
    """Of what couples examples, as a load balance does, the mean over micro-batches."""
    model, sown = Sows(), ("losses", "intermediates")
    pipe, variables, tree = check(model, sown, 2, 2, mesh=jax.make_mesh((2, 2), ("stage", "data")))
    assert len({*functions_of_blocks(pipe)}) == 1
    plain = lambda x: tuple(model.apply({"params": tree["params"]}, x, mutable=sown))
    whole, halves = plain(X), [jax.tree.leaves(plain(x)[1]["losses"]) for x in np.split(X, 2)]
    whole[1]["losses"] = jax.tree.unflatten(jax.tree.structure(whole[1]["losses"]), np.mean(halves, 0))
    assert_close(pipe.apply(variables, {"inputs": X}), whole)
    state = pipe.create_state(jax.random.key(1), {"inputs": X}, optax.sgd(1e-3))
    assert pipe.train_step(state, {"inputs": X})[1]["finite"]


class Sower(nnx.Module):
    def __init__(self, rngs):
        linear = lambda *sizes: nnx.Linear(*sizes, param_dtype=jnp.float64, rngs=rngs)
        self.front, self.blocks, self.head = linear(5, 6), nnx.List([linear(6, 6) for _ in range(3)]), linear(6, 2)

    def __call__(self, x):
        x = self.front(x)
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
            self.sow(nnx.Intermediate, "mean", jnp.mean(x))
        return self.head(x)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_an_nnx_module_sows():
    """What it had sown before is no variable."""
    graph, params, rest = nnx.split(Sower(nnx.Rngs(0)), nnx.Param, ...)
    model = nnx.merge(graph, params, rest)
    model(X)

    def plain(params):
        module = nnx.merge(graph, params, rest)
        return module(X), {"intermediates": nnx.to_pure_dict(nnx.state(module, nnx.Intermediate))}

    pipe = jpipe.Pipeline(model, loss, num_stages=2, num_microbatches=2, sown="intermediates")
    variables = pipe.init(jax.random.key(0), {"inputs": X})
    assert {*variables} == {"params"}
    (value, _), gradients = pipe.value_and_grad(variables, {"inputs": X})
    expected = jax.value_and_grad(lambda params: loss(plain(params), None))(params)
    assert_close(
        (value, pipe.model_variables({"params": gradients})["params"]), (expected[0], nnx.to_pure_dict(expected[1]))
    )
    assert_close(pipe.apply(variables, {"inputs": X}), plain(params))


@pytest.mark.filterwarnings("default")
def test_what_is_dropped_is_said():
    pipe = jpipe.Pipeline(Sows(), loss, num_stages=2, num_microbatches=1, sown="losses")
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="is dropped; sown="):
        assert {*pipe.init(jax.random.key(0), {"inputs": X})} == {"params"}


@pytest.mark.parametrize(
    ("model", "sown"),
    [
        ([Block(), Block()], "losses"),
        (jpipe.Layer(lambda key, x: x, lambda p, x: x), "losses"),
        (Sows(), 3),
        (Sows(), "params"),
    ],
)
def test_bad_names(model, sown):
    with pytest.raises(TypeError, match=f"sown={sown!r}: name collections that one Linen or nnx module sows into"):
        jpipe.Pipeline(model, loss, num_stages=1, num_microbatches=1, sown=sown)


class Places(nn.Module):
    """Sows a number for each token: more of them in a larger batch, and in a longer sequence."""

    @nn.compact
    def __call__(self, x):
        x = Dense(6)(x)
        for _ in range(3):
            x = x + jnp.tanh(Dense(6)(x))
            self.sow("intermediates", "means", x.mean(-1).reshape(-1))
        return Dense(2)(x)


def test_rows_are_as_long_as_the_batch_at_hand_makes_them():
    model, x = Places(), np.random.default_rng(1).normal(size=(8, 3, 5))
    of_outputs = lambda outputs, batch: jnp.mean(outputs[0] ** 2) + sum(map(jnp.mean, jax.tree.leaves(outputs[1])))
    pipe = jpipe.Pipeline(model, of_outputs, num_stages=2, num_microbatches=2, sown="intermediates")
    tree = {"params": model.init(jax.random.key(0), x)["params"]}
    variables = pipe.from_model_variables(tree, {"inputs": x})
    for part in (x, x[:4], x[:, :2]):
        plain = of_outputs(model.apply(tree, part, mutable="intermediates"), None)
        assert_close(pipe.evaluate(variables, {"inputs": part}), plain)


class Several(nn.Module):
    """Sows sums, means, a norm of parameters and a load, all scalars of one type."""

    @nn.compact
    def __call__(self, x):
        x = Dense(6)(x)
        for i in range(3):
            dense = Dense(6, name=f"block_{i}")
            x = x + jnp.tanh(dense(x))
            self.sow("losses", f"sum_{i}", jnp.sum(x**2))
            self.sow("losses", f"mean_{i}", jnp.mean(x**2))
            self.sow("losses", f"norm_{i}", jnp.sum(dense.variables["params"]["kernel"] ** 2))
            self.sow("losses", f"load_{i}", jnp.sum(jnp.mean(x, 0) ** 2))
        return Dense(2)(x)


def test_sums_and_means_have_queues_of_their_own():
    model = Several()
    tree = {"params": model.init(jax.random.key(0), X)["params"]}
    pipe = jpipe.Pipeline(model, loss, num_stages=2, num_microbatches=2, sown="losses", loss_over="microbatch")
    found = pipe.apply(pipe.from_model_variables(tree, {"inputs": X}), {"inputs": X})
    plain = lambda x: tuple(model.apply(tree, x, mutable="losses"))
    outputs, halves = plain(X), [plain(x)[1]["losses"] for x in np.split(X, 2)]
    means = jax.tree.map(lambda *two: np.mean(two), *halves)
    losses = {name: means[name] if "load" in name else own for name, own in outputs[1]["losses"].items()}
    assert_close(found, (outputs[0], {"losses": losses}))


class Unlike(nn.Module):
    """Sows something else in evaluation."""

    @nn.compact
    def __call__(self, x, train):
        x = Dense(6)(x)
        self.sow("losses", "own" if train else "other", jnp.mean(x))
        return Dense(2)(x)


def test_values_of_evaluation_alone():
    pipe = jpipe.Pipeline(Unlike(), loss, num_stages=2, num_microbatches=2, sown="losses")
    variables = pipe.init(jax.random.key(0), {"inputs": X})
    pipe.value_and_grad(variables, {"inputs": X})
    with pytest.raises(ValueError, match="sows values in evaluation that it doesn't sow in training"):
        pipe.evaluate(variables, {"inputs": X})
