"""Calls layers: with `jpipe.Arguments`, told their mode by a word of their signature, and as they decode.

A layer in decode mode is in evaluation mode, takes a token or a few at a time, and writes its caches. A cache is a
collection of its layer's, called `cache`. It is as long as the sequence that the layer is initialised for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jpipe.layers.base import Activation, AnyLayer, Context, Inputs, LayerVariables
from jpipe.types import Leaf, PyTree, Shapes


@jax.tree_util.register_pytree_with_keys_class
class Arguments:
    """Arguments that a model is called with: `model(*positional, **keywords)`.

    `Pipeline(model, ..., inputs=lambda batch: jpipe.Arguments(batch["tokens"], mask=batch["mask"]))`. For positional
    arguments alone `inputs` may return a tuple.

    Args:
      positional, keywords: pytrees. Their arrays are data. Python's own values (`True`, 0.5, "gelu") stay what they
        are, so that a model may branch on them. An argument by which jpipe would tell the mode (`train`,
        `deterministic`) has the value that is given here, in training and in evaluation.
    """

    def __init__(self, *positional: PyTree, **keywords: PyTree):
        leaves, self._structure = jax.tree.flatten((positional, keywords))
        is_array = lambda leaf: hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        self._fixed = tuple(None if is_array(leaf) else (type(leaf), leaf) for leaf in leaves)  # 1 isn't True
        self._arrays = tuple(filter(is_array, leaves))

    @property
    def both(self) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """(positional arguments, keyword arguments)."""
        arrays = iter(self._arrays)
        return jax.tree.unflatten(self._structure, [fixed[1] if fixed else next(arrays) for fixed in self._fixed])

    def tree_flatten_with_keys(self) -> tuple[list[tuple[object, Leaf]], tuple[object, object]]:
        """The arrays, each with its place or its keyword; all that stays as it is."""
        named = jax.tree_util.tree_leaves_with_path(self.both)
        keys = [jax.tree_util.keystr(path[1:], simple=True, separator="/") for path, _ in named]
        names = [jax.tree_util.GetAttrKey(key) for key, fixed in zip(keys, self._fixed, strict=True) if fixed is None]
        return list(zip(names, self._arrays, strict=True)), (self._structure, self._fixed)

    @classmethod
    def tree_unflatten(cls, rest: tuple[object, object], arrays: Sequence[Leaf]) -> Arguments:
        """The inverse of `tree_flatten_with_keys`."""
        made, (structure, fixed) = object.__new__(cls), rest
        vars(made).update(_structure=structure, _fixed=fixed, _arrays=tuple(arrays))
        return made

    def __repr__(self) -> str:
        positional, keywords = self.both
        return f"Arguments({', '.join([*map(repr, positional), *(f'{name}={x!r}' for name, x in keywords.items())])})"


def both_of(inputs: Inputs) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """(positional arguments, keyword arguments) of a layer that is called with these inputs."""
    return inputs[0].both if len(inputs) == 1 and isinstance(inputs[0], Arguments) else (inputs, {})


NO_KEY = (
    "draws random numbers in evaluation mode, and got no key; pass one: pipe.evaluate(variables, batch, key), or "
    "pipe.apply; or make it deterministic there, by an argument `deterministic` or `train`, or hand it what it would "
    "draw, such as the initial_carry of an nnx.RNN"
)


# --- signatures -------------------------------------------------------------------------------------------------------


ModeArguments = dict[str, bool]
"""Booleans by keyword, for functions that may also take others."""

IN_TRAINING: tuple[str, ...] = ("train", "training", "is_training", "is_train", "enable_dropout", "apply_dropout")
IN_EVALUATION: tuple[str, ...] = ("deterministic", "use_running_average", "is_eval", "eval_mode", "inference")
"""Names of arguments that tell a layer its mode: those that are True in training, and those that are in evaluation."""

MODE_NAMES = f"{', '.join((*IN_TRAINING, *IN_EVALUATION[:-1]))} or {IN_EVALUATION[-1]}"


def mode_arguments(function: Callable, train: bool, taken: Callable[[str], bool] = lambda name: False) -> ModeArguments:
    """Picks the keyword arguments that tell `function` whether it trains: the known ones that its signature names.

    Args:
      function: any callable.
      train: training (True) or evaluation (False).
      taken: whether the user has given an argument of this name already; it is left out then.
    """
    parameters = signature_of(function)
    return {name: value for name, value in modes(train).items() if name in parameters and not taken(name)}


def modes(train: bool) -> ModeArguments:
    """Gives every argument that tells a mode its value, in training or in evaluation."""
    return dict.fromkeys(IN_TRAINING, train) | dict.fromkeys(IN_EVALUATION, not train)


def signature_of(function: Callable) -> Mapping[str, inspect.Parameter]:
    """Reads the parameters of `function` by name, without those that `functools.partial` fixes; a class's `__init__`'s.

    Empty for functions that Python can't inspect.
    """
    fixed = function.keywords if isinstance(function, functools.partial) else {}
    inner = function.func if isinstance(function, functools.partial) else function
    try:
        described = inspect.signature(inner.__init__ if isinstance(inner, type) else function)
    except (TypeError, ValueError):
        return {}
    return {name: p for name, p in described.parameters.items() if name not in fixed}


# --- decode mode ------------------------------------------------------------------------------------------------------


CACHE = "cache"
"""The collection that a decoding layer writes, of Linen modules and of `nnx.Cache` variables."""


def decoding(layer: AnyLayer, takes: Shapes, size: int, length: int) -> AnyLayer:
    """Puts a layer in decode mode, with caches for sequences of a length. One without is called as in evaluation.

    A side input is None, since there is no batch.

    Args:
      layer: any layer.
      takes: the shapes that it takes in training, `[b, T, ...]`.
      size: the sequences that it is called with at a time.
      length: of the longest sequence.
    """
    decoder = token_by_token(layer, length) if layer.decode is None else layer.decode(takes, size, length)
    return replace(decoder, shared=layer.shared)


def token_by_token(layer: AnyLayer, length: int) -> AnyLayer:
    """Makes the layer that takes a few tokens at a time: it is always in evaluation mode.

    Args:
      layer: its decode mode, or a layer without one.
      length: of the sequences that it is initialised for.
    """

    def init(inputs: Inputs, context: Context) -> LayerVariables:
        # Flax makes a cache as long as the inputs of `init` are, so these are whole sequences, [size, length, ...].
        sequences = jax.tree.map(lambda a: jnp.zeros((a.shape[0], length, *a.shape[2:]), a.dtype), inputs)
        return layer.init(sequences, context)

    def apply(variables: LayerVariables, inputs: Inputs, context: Context) -> tuple[Activation, LayerVariables]:
        return layer.apply(variables, inputs, Context(None, False, context.batch))

    return replace(layer, init=init, apply=apply, made_of=("token by token", layer.made_of, length))
