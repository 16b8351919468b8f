"""A loss of one number is the mini-batch's, as it is written, whatever M; one that couples examples is refused.

Masked means, contrastive losses and the like became others without a word where M > 1: each micro-batch's own loss was
taken, and averaged. The truth is plain JAX, on the whole batch, in float64.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe

B, T, V = 8, 6, 5
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


@pytest.fixture(autouse=True)
def as_users_run():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def data(size=B):
    rng = np.random.default_rng(size)
    batch = {
        "inputs": rng.standard_normal((size, T, 4)),
        "labels": rng.integers(0, V, (size, T)),
        "mask": 1.0 * (rng.random((size, T)) < 0.4),
        "advantage": rng.standard_normal(size),
        "old": rng.standard_normal((size, T)),
        "class": rng.integers(0, V, size),
    }
    batch["mask"][1] = 0  # a micro-batch of one example has no word that counts
    return batch


def log_prob(o, b):
    return jnp.take_along_axis(jax.nn.log_softmax(o), b["labels"][..., None], -1)[..., 0]


def normalized(b):
    return ((b["advantage"] - b["advantage"].mean()) / (b["advantage"].std() + 1e-6))[:, None]


def clipped_ratio(o, b):
    ratio = jnp.exp(log_prob(o, b) - b["old"])
    return -jnp.mean(jnp.minimum(ratio * normalized(b), jnp.clip(ratio, 0.8, 1.2) * normalized(b)))


def smoothed(o, b):
    targets = optax.smooth_labels(jax.nn.one_hot(b["labels"], V), 0.1)
    each = optax.softmax_cross_entropy(o, targets) * b["mask"]
    return each.sum() / b["mask"].sum() + 1e-3 * jnp.mean(jax.nn.logsumexp(o, -1) ** 2)


def over_time(o, b):
    def add(total, at):
        logits, labels, mask = at
        return total + (cross_entropy(logits, labels) * mask).sum(), None

    by_time = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (o, b["labels"], b["mask"]))
    return jax.lax.scan(add, jnp.zeros(()), by_time)[0] / b["mask"].sum()


def connectionist(o, b):
    labels = jnp.maximum(b["labels"][:, :3], 1)
    return optax.ctc_loss(o, jnp.zeros(o.shape[:2]), labels, jnp.zeros(labels.shape)).mean()


@jax.custom_vjp
def clip_cotangent(x):
    return x


clip_cotangent.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.002, 0.003),))


def class_weights(o, b):
    counts = jnp.bincount(b["labels"].ravel(), length=V) + 1
    return (cross_entropy(o, b["labels"]) / counts[b["labels"]]).sum()


EXACT = {
    "mean": lambda o, b: cross_entropy(o, b["labels"]).mean(),
    "masked mean": lambda o, b: (cross_entropy(o, b["labels"]) * b["mask"]).sum() / b["mask"].sum(),
    "masked mean of at least one": lambda o, b: (
        (cross_entropy(o[:, :-1], b["labels"][:, 1:]) * b["mask"][:, 1:]).sum() / jnp.maximum(b["mask"][:, 1:].sum(), 1)
    ),
    "mean where": lambda o, b: jnp.mean(cross_entropy(o, b["labels"]), where=b["mask"] > 0),
    "where there is a mask": lambda o, b: jnp.where(
        b["mask"].sum() > 0, (cross_entropy(o, b["labels"]) * b["mask"]).sum() / b["mask"].sum(), 0.0
    ),
    "smoothing and z loss": smoothed,
    "normalised advantages": clipped_ratio,
    "class weights": class_weights,
    "plus a term of the batch": lambda o, b: cross_entropy(o, b["labels"]).mean() + b["advantage"].std(),
    "time first": lambda o, b: cross_entropy(jnp.swapaxes(o, 0, 1).reshape(-1, V), b["labels"].T.reshape(-1)).mean(),
    "mean of sequence means": lambda o, b: (
        (cross_entropy(o, b["labels"]) * b["mask"]).sum(-1) / jnp.maximum(b["mask"].sum(-1), 1)
    ).mean(),
    "mean square": lambda o, b: jnp.vdot(o, o) / o.size,
    "divergence": lambda o, b: optax.kl_divergence(jax.nn.log_softmax(o), jax.nn.softmax(o[..., ::-1])).mean(),
    "by rows": lambda o, b: -jax.nn.log_softmax(o[:, 0])[jnp.arange(len(o)), b["class"]].mean(),
    "weights by place in the batch": lambda o, b: (o[..., 0].mean(1) * jnp.linspace(0, 1, len(o))).sum(),
    "ranks": lambda o, b: (o[:, 0, 0] * jnp.argsort(b["advantage"])).mean(),
    "over time": over_time,
    "loop": lambda o, b: jax.lax.fori_loop(0, T, lambda t, total: total + jnp.tanh(o[:, t]).mean(), jnp.zeros(())),
    "branch": lambda o, b: jax.lax.cond(b["mask"].sum() > 3, lambda o: (o**2).mean(), lambda o: o.mean(), o),
    "jit": jax.jit(lambda o, b: cross_entropy(o, b["labels"]).mean()),
    "connectionist": connectionist,
    "derivatives of one's own": lambda o, b: (clip_cotangent(o) ** 2).mean(),
    "per class": lambda o, b: jnp.dot(o.sum((0, 1)), jnp.arange(1.0, V + 1)) / b["mask"].sum(),
    "singular values": lambda o, b: jnp.linalg.svd(o, compute_uv=False)[:, :2].mean(),
}

COUPLED = {
    "contrastive": (lambda o, b: cross_entropy(o[:, 0] @ o[:, 1].T, jnp.arange(len(o))).mean(), "pairs of examples"),
    "root mean square": (lambda o, b: jnp.sqrt(jnp.mean(o**2)), "no linear function"),
    "normalised outputs": (lambda o, b: jnp.mean(((o - o.mean(0)) / o.std(0)) ** 2 * o), "no linear function"),
    "load balance": (lambda o, b: jnp.sum(jax.nn.softmax(o).mean((0, 1)) ** 2), "no linear function"),
    "hard examples": (lambda o, b: jnp.sort(cross_entropy(o, b["labels"]).mean(1))[-4:].mean(), "in order"),
    "largest": (lambda o, b: jnp.max(jnp.abs(o)), "all examples together"),
    "running sum": (lambda o, b: jnp.tanh(jnp.cumsum(o, 0)).mean(), "in order"),
    "distances": (lambda o, b: jnp.mean((o[:, None, 0] - o[None, :, 0]) ** 2), "pairs of examples"),
}

SETTINGS = [
    {"num_microbatches": 4, "mesh": {"data": 2}},
    {"num_microbatches": 8},
    {"num_microbatches": 2, "schedule": "gpipe", "remat": "none"},
]
MORE = [
    {"num_microbatches": 2, "mesh": {"data": 2}, "schedule": "zero_bubble", "remat": "none"},
    {"num_microbatches": 4, "schedule": "interleaved", "num_chunks": 2},
    {"num_microbatches": 1},
]
ALL = [SETTINGS[0], *(pytest.param(options, marks=pytest.mark.slow) for options in (*SETTINGS[1:], *MORE))]


class Model(nn.Module):
    """Words' vectors `[b, T, 4]` to logits `[b, T, V]`."""

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, param_dtype=jnp.float64)
        for _ in range(4):
            x = x + jnp.tanh(dense(4)(x))
        return dense(V)(x)


def pipeline(loss, mesh=None, model=None, **options):
    grid = jpipe.make_mesh(stage=2, **mesh, devices=jax.devices()[: 2 * 2]) if mesh else None
    return jpipe.Pipeline(model or Model(), loss, num_stages=2, mesh=grid, **{"balance": "even"} | options)


def compare(loss, options, plain=None, batch=None, model=None, key=None):
    """Loss, every gradient and the evaluation's loss beside plain JAX on the whole batch.

    Args:
      loss, options, model: of the pipeline.
      plain: the loss in plain JAX, of outputs and batch, if it is another; or a function of the model's variables.
      batch, key: of the step.
    """
    model, batch = model or Model(), batch or data()
    pipe = pipeline(loss, model=model, **options)
    inputs = (options.get("inputs") or (lambda b: (b["inputs"],)))(batch)
    tree = model.init(jax.random.key(0), *inputs)
    variables = pipe.from_model_variables(tree, batch)
    of_batch = plain if key is not None else lambda tree: (plain or loss)(model.apply(tree, *inputs), batch)
    wanted, gradients = jax.jit(jax.value_and_grad(of_batch))(tree)
    (found, _), grads = pipe.value_and_grad(variables, batch, key)
    mine = pipe.model_variables({"params": grads})
    close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
    close(found, wanted)
    jax.tree.map(close, jax.device_get(mine), {"params": gradients["params"]})
    if key is None:
        close(pipe.evaluate(variables, batch), wanted)
    return pipe, variables


def scaled(losses):
    """Terms of one loss, each with a factor of its own, so that the gradients of none make up for another's."""
    rng = np.random.default_rng(1)
    factors = {name: rng.uniform(0.5, 2) for name in losses}
    return lambda o, b: {name: factors[name] * loss(o, b) for name, loss in losses.items()}


@pytest.mark.parametrize("options", ALL, ids=str)
def test_many_losses_in_one(options):
    terms = scaled(EXACT)
    pipe, variables = compare(terms, options, lambda o, b: sum(terms(o, b).values()))
    batch = data()
    plain = jax.jit(lambda tree: terms(Model().apply(tree, batch["inputs"]), batch))(pipe.model_variables(variables))
    state = pipe.create_state(jax.random.key(0), batch, optax.sgd(0.1), variables)
    metrics = pipe.train_step(state, batch)[1]
    for name, value in plain.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-11, err_msg=name)


@pytest.mark.parametrize(("name", "options"), [(n, SETTINGS[i % 3]) for i, n in enumerate(COUPLED)], ids=str)
def test_a_loss_that_couples_examples_is_refused(name, options):
    """Before anything is compiled; its line and the three choices are named."""
    loss, words = COUPLED[name]
    with pytest.raises(ValueError, match=words) as error:
        pipeline(loss, **options).init(jax.random.key(0), data())
    text = str(error.value)
    assert "test_losses_as_written.py:" in text
    for choice in ('loss_over="batch"', "(loss_sum, weight_sum)", 'loss_over="microbatch"'):
        assert choice in text


OF_ALL = lambda o, b: sum(loss(o, b) for loss, _ in COUPLED.values())


@pytest.mark.parametrize("options", ALL, ids=str)
def test_any_loss_of_the_whole_batch(options):
    """`loss_over="batch"`: the gradient at the outputs of all micro-batches, then the ordinary step."""
    compare(OF_ALL, options | {"loss_over": "batch"})


def test_with_one_micro_batch_any_loss_is_exact():
    compare(OF_ALL, {"num_microbatches": 1})


def test_choices_work_as_they_are_printed():
    """The pair, and each micro-batch's own loss: what it was before."""
    loss, M = COUPLED["contrastive"][0], 2

    def of_each(o, b):
        part = lambda a, m: a[m * B // M : (m + 1) * B // M]
        return sum(loss(part(o, m), jax.tree.map(lambda a, m=m: part(a, m), b)) for m in range(M)) / M

    compare(loss, {"num_microbatches": M, "loss_over": "microbatch"}, of_each)
    compare(lambda o, b: (loss(o, b) * len(o), 1.0 * len(o)), {"num_microbatches": M}, of_each)
    with pytest.raises(ValueError, match=r"loss_over='bath' is unknown; use 'batch' or 'microbatch'"):
        pipeline(loss, num_microbatches=2, loss_over="bath")


def test_the_first_of_three_values_and_metrics():
    """`(loss, 1.0, metrics)`: the loss is the mini-batch's; a metric is the mean over micro-batches, or a pair."""
    masked = EXACT["masked mean"]
    hits = lambda o, b: ((o.argmax(-1) == b["labels"]) * b["mask"]).sum()
    loss = lambda o, b: (masked(o, b), 1.0, {"accuracy": (hits(o, b), b["mask"].sum())})
    for over in (None, "batch"):
        pipe, variables = compare(loss, {"num_microbatches": 4, "loss_over": over}, masked)
        state = pipe.create_state(jax.random.key(0), data(), optax.sgd(0.1), variables)
        outputs = Model().apply(pipe.model_variables(variables), data()["inputs"])
        metrics = pipe.train_step(state, data())[1]
        np.testing.assert_allclose(metrics["accuracy"], hits(outputs, data()) / data()["mask"].sum(), rtol=1e-12)


def test_a_weight_of_one_for_each_example_is_no_number_with_metrics():
    """With one example a micro-batch, `(sum, 1.0 * len(o), metrics)` was taken for a number: M times it."""
    total = lambda o, b: (b["mask"][..., None] * o**2).sum()
    loss = lambda o, b: (total(o, b), 1.0 * len(o), {"rows": (1.0, 1.0)})
    for M in (1, B // 2, B):
        compare(loss, {"num_microbatches": M}, lambda o, b: total(o, b) / len(o))


def test_evaluation_of_any_batch_size():
    loss = EXACT["masked mean"]
    pipe, variables = compare(loss, {"num_microbatches": 4})
    for size in (6, 7):
        outputs = Model().apply(pipe.model_variables(variables), data(size)["inputs"])
        np.testing.assert_allclose(pipe.evaluate(variables, data(size)), loss(outputs, data(size)), rtol=1e-12)


class WithNumber(nn.Module):
    """Gives a number of its own besides, or several."""

    number: Callable

    @nn.compact
    def __call__(self, x):
        y = Model()(x)
        return y, self.number(y)


NUMBERS = {
    "mean": lambda y: jnp.mean(y**2),
    "sum": lambda y: jnp.sum(y**2),
    "means of classes": lambda y: jnp.mean(y, (0, 1)),
    "a tenth of a sum": lambda y: jnp.sum(y) / 10,
    "weights of NumPy": lambda y: np.full(len(y), 1 / len(y)) @ y[:, 0, 0],
    "a mask of whole numbers": lambda y: jnp.mean(jnp.where(jnp.arange(y.shape[-1]) // 2 % 2 == 0, y, 0.0)),
    "constants of NumPy": lambda y: jnp.sum(y, (0, 1)) * np.linspace(1, 2, y.shape[-1]),
}


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(("over", "M", "size"), [(None, 4, 8), SLOW("batch", 4, 8), SLOW(None, 3, 9)])
def test_numbers_that_a_model_gives_itself(over, M, size):
    """A sum over its examples came out as the mean over micro-batches."""
    terms = scaled({name: lambda o, b, name=name: jnp.sum(o[1][name]) for name in NUMBERS})
    loss = lambda o, b: EXACT["masked mean"](o[0], b) + 0.1 * sum(terms(o, b).values())
    all_of_them = WithNumber(lambda y: {name: number(y) for name, number in NUMBERS.items()})
    compare(loss, {"num_microbatches": M, "loss_over": over}, model=all_of_them, batch=data(size))


def test_a_number_of_the_model_is_not_of_the_mini_batch_unless_it_is_linear():
    loss = lambda o, b: EXACT["mean"](o[0], b) + jnp.sqrt(o[1])
    with pytest.raises(ValueError, match="no linear function"):
        pipeline(loss, model=WithNumber(NUMBERS["mean"]), num_microbatches=4).init(jax.random.key(0), data())
    compare(loss, {"num_microbatches": 4, "loss_over": "batch"}, model=WithNumber(NUMBERS["mean"]))


class WithNorm(nn.Module):
    """Adds a norm of parameters to a sum over examples, in its last block or block by block."""

    in_all: bool

    @nn.compact
    def __call__(self, x):
        y, total = Model()(x), 0.0
        for i in range(3):
            head = nn.Dense(y.shape[-1], param_dtype=y.dtype)
            y = y + head(y)
            if self.in_all or i == 2:
                total += jnp.sum(y**2) + jnp.sum(head.variables["params"]["kernel"] ** 2)
        return y, total


REFUSED = [
    lambda y: jnp.mean(y) + jnp.sum(y),
    lambda y: jnp.sum(y / len(y)),
    lambda y: jnp.sum(y**2) + 100.0,
    lambda y: jnp.stack([jnp.sum(y), jnp.asarray(5.0, y.dtype)]),
    lambda y: jnp.where(np.arange(y.shape[-1]) > 2, y.sum((0, 1)), 1.0),
    lambda y: jnp.sum(np.full(len(y), 1 / len(y)) * y[:, 0, 0]),
    lambda y: jnp.average(y[:, 0, 0], weights=np.arange(1.0, len(y) + 1)),
    lambda y: jax.lax.scan(lambda total, each: (total + each.sum(), None), jnp.zeros((), y.dtype), y)[0],
    lambda y: y[0].sum(),
    lambda y: jnp.sum(jnp.where((jnp.arange(len(y)) == 0)[:, None, None], y, 0.0)),
    lambda y: jnp.sum(y * jax.nn.one_hot(0, len(y), dtype=y.dtype)[:, None, None]),
    lambda y: jnp.trace(y[:, 0]),
    lambda y: jnp.sum(jnp.roll(y, 1, 0) * y),
    lambda y: jnp.sum(y * y[:1]),
    lambda y: jnp.mean(jnp.take(y, np.arange(4), axis=0)),
    lambda y: y[:4].sum(),  # of a micro-batch all
    lambda y: y.sum() / max(len(y), 4),
    lambda y: 2 * y.sum() if len(y) == B else y.sum(),
    lambda y: jnp.sum(jnp.ones(len(y)) / jnp.ones(len(y)).sum() * y[:, 0, 0]),
    lambda y: jax.lax.scan(lambda total, of_t: (total + of_t.mean(), None), 0.0, y.swapaxes(0, 1))[0],
]


@pytest.mark.parametrize("model", [*map(WithNumber, REFUSED), WithNorm(False), WithNorm(True)])
def test_numbers_that_are_neither_a_sum_nor_a_mean_are_refused(model):
    """What was added to a sum was counted M times; an example's own number was the micro-batches' mean."""
    pipe = pipeline(lambda o, b: EXACT["mean"](o[0], b) + o[1].sum(), model=model, num_microbatches=4)
    with pytest.raises(ValueError, match=r"outputs\[1\] has no examples, and is neither their sum nor mean"):
        pipe.init(jax.random.key(0), data())


def test_numbers_that_are_no_examples_places():
    """What is dropped isn't told by these, nor is a look-up in own rows; all examples are looked at together, too."""
    loss = lambda o, b: EXACT["mean"](o[0], b) + o[1]
    dropped = WithNumber(lambda y: jnp.mean(nn.Dropout(0.5, deterministic=False)(y)))
    jax.eval_shape(pipeline(loss, model=dropped, num_microbatches=4).init, jax.random.key(0), data())
    jax.eval_shape(pipeline(loss, model=WithNumber(jnp.mean), num_microbatches=B).init, jax.random.key(0), data())
    last = WithNumber(lambda y: jnp.mean(y[jnp.arange(len(y)), jnp.argmax(y[..., 0], -1)]))
    jax.eval_shape(pipeline(loss, model=last, num_microbatches=4).init, jax.random.key(0), data())
    few = WithNumber(lambda y: jnp.mean(y) if len(y) <= 4 else y.sum(9))
    with pytest.raises(ValueError, match="can't be traced for 8 examples; let it take any batch size"):
        pipeline(loss, model=few, num_microbatches=4).init(jax.random.key(0), data())


class Coupled(WithNumber):
    """Couples examples in an earlier layer, which is marked."""

    @nn.compact
    def __call__(self, x):
        y = Model()(x)
        y = y + jnp.mean(y) ** 2
        for _ in range(2):
            y = jnp.tanh(nn.Dense(y.shape[-1], param_dtype=y.dtype)(y))
        return y, self.number(y)


def test_numbers_beside_layers_that_are_marked():
    """Where one layer coupled examples, places weren't looked for in the others."""
    loss = lambda o, b: EXACT["mean"](o[0], b) + o[1]
    make = lambda number: pipeline(loss, model=Coupled(number), num_microbatches=4)
    with pytest.warns(UserWarning, match="looks at several"):
        make(jnp.mean).init(jax.random.key(0), data())
    with pytest.raises(ValueError, match=r"outputs\[1\] has no examples, and is neither their sum nor mean"):
        make(lambda y: jnp.sum(y * (jnp.arange(len(y)) == 0)[:, None, None])).init(jax.random.key(0), data())


def fixed(shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float64)


DRAWS = {
    "logits": lambda o, b: cross_entropy(o + fixed(o.shape), b["labels"]).mean(),
    "weights": lambda o, b: (o[:, 0, 0] * fixed((len(o),))).mean() / fixed((len(o),)).sum(),
    "turned": lambda o, b: ((o - fixed((T, len(o), 1)).swapaxes(0, 1)) ** 2).mean(),
    "a key of the batch": lambda o, b: jnp.mean(
        o * jax.random.bernoulli(jax.random.fold_in(jax.random.key(1), b["class"][0]), 0.5, o.shape)
    ),
}


@pytest.mark.parametrize("options", [SETTINGS[0], pytest.param(SETTINGS[2], marks=pytest.mark.slow)], ids=str)
def test_draws_by_another_key_are_those_of_the_mini_batch(options):
    """Each micro-batch drew bits of its own by a key that was a constant, or made of the batch."""
    terms = scaled(DRAWS)
    compare(terms, options, lambda o, b: sum(terms(o, b).values()))


def test_draws_of_the_loss_are_those_of_each_micro_batch():
    """With a parameter `key` it draws for each micro-batch, and is the mini-batch's in all else."""

    def loss(o, b, key=None):
        noise = 0.0 if key is None else jax.random.normal(key, o.shape, o.dtype)
        return (jnp.square(o + noise).sum(-1) * b["mask"]).sum() / b["mask"].sum()

    model, batch, key = Model(), data(), jax.random.key(3)

    def plain(tree):
        o = model.apply(tree, batch["inputs"])
        keys = [jax.random.fold_in(jax.random.fold_in(key, m), 0x1055) for m in range(4)]
        noise = jnp.concatenate([jax.random.normal(k, (2, T, V), o.dtype) for k in keys])
        return (jnp.square(o + noise).sum(-1) * batch["mask"]).sum() / batch["mask"].sum()

    pipe, variables = compare(loss, {"num_microbatches": 4}, plain, model=model, key=key)
    assert pipe.check_gradients(variables, batch, key).agrees


class Towers(nn.Module):
    """Two towers, as FlaxCLIP's: `pairs` makes `[b, b]` logits in the model, else it returns the embeddings."""

    pairs: bool

    @nn.compact
    def __call__(self, a, t):
        dense = functools.partial(nn.Dense, param_dtype=jnp.float64)
        for _ in range(2):
            a, t = jnp.tanh(dense(8)(a)), jnp.tanh(dense(8)(t))
        return 10 * t @ a.T if self.pairs else (a, t)


def of_pairs(logits):
    own = jnp.arange(len(logits))
    return (cross_entropy(logits, own) + cross_entropy(logits.T, own)).mean() / 2


def test_a_model_that_makes_pairs_itself():
    """It trained with the negatives of a micro-batch alone; the remedy equals plain JAX on the whole batch."""
    rng = np.random.default_rng(0)
    batch = {"a": rng.standard_normal((8, 6)), "t": rng.standard_normal((8, 6))}
    options = {"num_microbatches": 4, "inputs": lambda b: (b["a"], b["t"])}
    with pytest.raises(ValueError, match=r"\(2, 2\).* makes pairs of the examples.*embeddings.*loss_over=\"batch\""):
        pipeline(lambda o, b: of_pairs(o), model=Towers(True), **options).init(jax.random.key(0), batch)
    loss = lambda o, b: of_pairs(10 * o[1] @ o[0].T)
    pipe, variables = compare(loss, options | {"loss_over": "batch"}, batch=batch, model=Towers(False))
    assert pipe.check_gradients(variables, batch).agrees


class Balanced(nn.Module):
    """Adds a number that looks at all examples of a micro-batch."""

    @nn.compact
    def __call__(self, x):
        scores = nn.softmax(nn.Dense(4, param_dtype=jnp.float64)(x))
        return x * (1 + jnp.sum(jnp.mean(scores, (0, 1)) ** 2))


def test_layers_that_couple_examples_are_named():
    """By a notice, by `print(pipe)` and by `check_gradients`, which agreed with them."""
    model = nn.Sequential([nn.Dense(4, param_dtype=jnp.float64), Balanced(), nn.Dense(V, param_dtype=jnp.float64)])
    batch, line = data(), r"looks? at several examples of a micro-batch: \w+ at test_losses_as_written.py:\d+"
    pipe = jpipe.Pipeline([*model.layers], EXACT["mean"], num_stages=2, num_microbatches=4)
    with pytest.warns(UserWarning, match=rf"layer 1 \(Balanced\) {line}.*num_microbatches=4"):
        variables = pipe.init(jax.random.key(0), batch)
    assert "layer 1 (Balanced) looks at several examples" in str(pipe)
    found = pipe.check_gradients(variables, batch)
    assert not found.agrees and "layer 1 (Balanced) looks at several examples" in str(found)


def test_a_check_of_gradients_sees_each_micro_batch_own_loss():
    """It cut the plain model into micro-batches too, and agreed."""
    loss = COUPLED["contrastive"][0]
    pipe = pipeline(loss, num_microbatches=4, loss_over="microbatch")
    variables = pipe.init(jax.random.key(0), data())
    found = pipe.check_gradients(variables, data())
    assert not found.agrees and 'with loss_over="microbatch", sees the examples of one micro-batch alone' in str(found)
    exact = pipeline(loss, num_microbatches=4, loss_over="batch")
    assert exact.check_gradients(exact.from_model_variables(pipe.model_variables(variables), data()), data()).agrees


def test_ends_that_are_shared(make_mesh):
    """All stages compute the loss together: the divisor of a masked mean is known to all."""
    rng = np.random.default_rng(0)
    batch = {"inputs": rng.integers(0, 128, (8, T)), "labels": rng.integers(0, 128, (8, T)), "mask": data()["mask"]}

    class Words(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Embed(128, 16, param_dtype=jnp.float64)(x)
            for _ in range(3):
                x = x + jnp.tanh(nn.Dense(16, param_dtype=jnp.float64)(x))
            return nn.Dense(128, param_dtype=jnp.float64)(x)

    contrastive = lambda o, b: jnp.sqrt(jnp.mean(o**2)) + EXACT["masked mean"](o, b)
    for loss, over in ((EXACT["masked mean"], None), (contrastive, "batch")):
        compare(loss, {"num_microbatches": 4, "ends": "shared", "loss_over": over}, batch=batch, model=Words())
