"""Checks that an optimiser may work on a pipeline's variables, computes its update, and sees whether it was skipped.

The update hands the loss to an optimiser that asks for it.

May a transformation see many layers' parameters in one array? An elementwise one may, and one that sums over all
parameters (a global norm). One that takes a norm, a mean or the shape of a single parameter (the trust ratio of lamb,
adaptive gradient clipping) would silently compute something else. So a transformation is tried on a few small arrays:
once each array is a parameter, and once several lie in one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jpipe.jax.primitives import ClosedJaxpr, draws
from jpipe.jax.tracing import equations_in, interpret, on_this_host, trace
from jpipe.jax.trees import accumulator_dtype
from jpipe.layers.calls import signature_of
from jpipe.memory.layout import TELLS_APART, PerLayerError, TellsApartError
from jpipe.types import Leaf, PyTree, Shapes


def check_is_optimizer(tx: object) -> None:
    """Checks that `tx` is an optax transformation.

    Raises:
      TypeError: it isn't.
    """
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"tx is a {type(tx).__name__}; pass an optax transformation, such as optax.adamw(1e-3) "
            "(of an optax.MultiSteps its gradient_transformation())"
        )


@contextmanager
def told_as(error_of: Callable[[str], Exception]) -> Iterator[None]:
    """Tells an error of a transformation as another one, made of its words; jpipe's own stay as they are."""
    try:
        yield
    except (PerLayerError, TellsApartError):
        raise
    except Exception as error:
        raise error_of(f"{type(error).__name__}: {error}") from error


_BY_PARAMETER = ("MaskedState", "PartitionState", "MultiTransformState", "FactoredState", "ScaleByTrustRatioState")


def checked_opt_state(tx: optax.GradientTransformation, params: Shapes, loss: jax.ShapeDtypeStruct) -> Shapes:
    """The shapes of the state of an optimiser that may work on these parameters; errors as of `abstract_state`."""
    check_is_optimizer(tx)
    with told_as(lambda words: ValueError(TELLS_APART.format(f"or its init raised {words}"))):
        opt_state = jax.eval_shape(tx.init, params)
    # Those inside of `per_layer` can't be seen in it. One that tells parameters apart without a state (the trust ratio
    # of lamb, adaptive gradient clipping) isn't noticed here, but by `check_elementwise`.
    is_by_parameter = lambda node: type(node).__name__ in _BY_PARAMETER
    for node in filter(is_by_parameter, jax.tree.leaves(opt_state, is_leaf=is_by_parameter)):
        raise ValueError(TELLS_APART.format(f"its state holds a {type(node).__name__}: a mask, labels, or statistics"))
    remedy = (
        "train_step gives it value=loss, and nothing that computes the loss again; use another transformation, or a "
        "step of your own with pipe.value_and_grad"
    )
    # Its arguments are checked, not their dtypes.
    with told_as(lambda words: TypeError(f"tx.update raised {words}. {remedy}")), jax.numpy_dtype_promotion("standard"):
        jax.eval_shape(partial(update_with_loss, tx), params, opt_state, params, loss)
    check_elementwise(tx)
    return opt_state


# --- the update -------------------------------------------------------------------------------------------------------


def global_norm(grads: PyTree) -> jax.Array:
    """The Euclidean norm of all gradients together, summed in float32 or better."""
    wide = [leaf.astype(accumulator_dtype(leaf.dtype)) for leaf in jax.tree.leaves(grads)]
    return jnp.sqrt(sum(jnp.sum(jnp.square(jnp.abs(leaf))) for leaf in wide))


def update_with_loss(
    tx: optax.GradientTransformation, grads: PyTree, opt_state: PyTree, params: PyTree, loss: Leaf
) -> tuple[PyTree, PyTree]:
    """Calls `tx.update`, with the loss as `value` if it takes one: (changes of the parameters, new state)."""
    update = optax.with_extra_args_support(tx).update
    parameters = signature_of(update)
    takes_value = "value" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return update(grads, opt_state, params, **({"value": loss} if takes_value else {}))


def skips(before: PyTree, after: PyTree) -> list[jax.Array]:
    """Whether an update was skipped: a bool for each part of an optimiser that may skip; empty if none may.

    `optax.apply_if_finite` counts the updates that it skips; the state of a `MultiSteps` with `should_skip_update_fn`
    says whether the last one was.

    Args:
      before: the optimiser's state before the update.
      after: its state after the update.
    """
    values = lambda state, name: [value for _, value in optax.tree_utils.tree_get_all_with_path(state, name)]
    counts = zip(values(after, "total_notfinite"), values(before, "total_notfinite"), strict=True)
    # The count and not `last_finite`, which may be of an earlier step.
    return [*(new != old for new, old in counts), *map(jnp.asarray, values(after, "should_skip"))]


# --- trials on small arrays -------------------------------------------------------------------------------------------


class Probe(dict[str, np.ndarray]):
    """Small arrays by name to try a transformation on; a pytree of a type of its own, so that `not_tried` knows it."""


jax.tree_util.register_pytree_with_keys(
    Probe,
    lambda tree: ([(jax.tree_util.DictKey(name), tree[name]) for name in sorted(tree)], tuple(sorted(tree))),
    lambda names, leaves: Probe(zip(names, leaves, strict=True)),
)


def not_tried(tx: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Makes a transformation do nothing where it is tried, since it shows each layer's arrays alone: `per_layer`."""

    def init(params: optax.Params) -> optax.OptState:
        return optax.EmptyState() if isinstance(params, Probe) else tx.init(params)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra: object
    ) -> tuple[optax.Updates, optax.OptState]:
        return (updates, state) if isinstance(updates, Probe) else tx.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


Probes = tuple[Probe, Probe]
"""(each array alone, the arrays of one shape together in one)."""

TOLERANCE = 1e-4
"""How far updates may be off, relative to a parameter's largest; sums in another order are off by 1e-7."""

_SHAPES = {"bias": (3,), "kernel": (4, 3), "heads": (2, 3, 2)}
_UPDATES, _MOST_STEPS = 3, 32


def check_elementwise(tx: optax.GradientTransformation) -> None:
    """Checks that a transformation does the same to parameters whether or not several lie in one array.

    It may be that one can't be tried: it raises on the arrays, or draws random numbers, which depend on shapes. Then it
    passes.

    Raises:
      ValueError: updates are off; by how much, and the remedy, are named.
    """
    if (off := deviation(tx) or 0.0) > TOLERANCE:
        raise ValueError(TELLS_APART.format(f"tried on small arrays in one, updates are off by up to {off:.1%}"))


@lru_cache(maxsize=32)
def deviation(tx: optax.GradientTransformation) -> float | None:
    """The difference between updates of parameters in one array and those of each parameter alone.

    Returns:
      The largest difference, relative to the largest update of its parameter; None if `tx` can't be tried.
    """
    tx = optax.with_extra_args_support(tx)

    def update(grads: Probes, states: list, trees: Probes, value: jax.Array) -> tuple[list, list]:
        pairs = [tx.update(*arguments, value=value) for arguments in zip(grads, states, trees, strict=True)]
        return [new for new, _ in pairs], [state for _, state in pairs]

    params = _both(_leaves(np.random.default_rng(0), 1.0))
    with on_this_host():  # computed, even if the caller is being traced; on one device, whatever the mesh is
        try:
            init, states = trace(lambda trees: [tx.init(tree) for tree in trees], params)
            step, _ = trace(update, params, states, params, np.float32(1))
            if any(draws(equation.primitive.name) for equation in equations_in(step.jaxpr.eqns)):
                return None
            return _run(step, interpret(init, *jax.tree.leaves(params)), params)
        except Exception:  # whatever it needs, it has with real parameters, or raises there
            return None


def _run(step: ClosedJaxpr, states: list[np.ndarray], params: Probes) -> float:
    """The largest deviation over several training steps.

    Args:
      step: the jaxpr of one update of both probes: from the leaves of gradients, states, parameters and a loss to those
        of updates and states.
      states: the leaves of both first states.
      params: the parameters, each in an array of its own and several in one.

    Steps are taken until some gave updates: a transformation may accumulate gradients, or start at a rate of zero.
    """
    random, worst, seen = np.random.default_rng(1), 0.0, 0
    num_apart, num_updates = len(params[0]), len(jax.tree.leaves(params))
    for number in range(_MOST_STEPS):
        grads = _both(_leaves(random, (1.0, 100.0, 0.01)[number % 3]))
        value = np.float32(1 / (1 + number))
        results = interpret(step, *jax.tree.leaves(grads), *states, *jax.tree.leaves(params), value)
        apart, together, states = results[:num_apart], results[num_apart:num_updates], results[num_updates:]
        pairs = [(array[0, i], apart[2 * n + i]) for n, array in enumerate(together) for i in (0, 1)]
        worst = max(worst, *(_off(update, expected) for update, expected in pairs))
        seen += any(np.any(expected) for _, expected in pairs)
        if seen == _UPDATES:
            break
    return worst


def _off(update: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference of two updates, relative to the largest that is expected."""
    largest, difference = np.max(np.abs(expected)), np.max(np.abs(update - expected))
    if not np.isfinite(difference):
        return 0.0 if np.array_equal(update, expected, equal_nan=True) else float("inf")
    return float(difference / largest) if largest else float(difference > 0)


def _leaves(random: np.random.Generator, scale: float) -> dict[str, list[np.ndarray]]:
    """Two arrays of each shape, by name: small numbers and large ones."""
    make = lambda shape, size: (scale * size * random.standard_normal(shape)).astype(np.float32)
    return {name: [make(shape, 0.1), make(shape, 3.0)] for name, shape in _SHAPES.items()}


def _both(leaves: dict[str, list[np.ndarray]]) -> Probes:
    """Makes both probes; arrays of one shape are rows of one `[1, 3, ...]`: one stage, two layers, an empty row."""
    apart = Probe({f"{name} {i}": leaf for name, pair in leaves.items() for i, leaf in enumerate(pair)})
    return apart, Probe({name: np.stack([*pair, np.zeros_like(pair[0])])[None] for name, pair in leaves.items()})
