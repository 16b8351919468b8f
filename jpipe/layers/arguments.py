"""`jpipe.Arguments`: positional and keyword arguments of a model, as `inputs(batch)` may return them."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jpipe.layers.base import Inputs
from jpipe.types import Leaf, PyTree


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

    def tree_flatten(self) -> tuple[tuple[Leaf, ...], tuple[object, object]]:
        """The arrays; all that stays as it is."""
        return self._arrays, (self._structure, self._fixed)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[object, Leaf]], tuple[object, object]]:
        """The same; each array with its place or its keyword."""
        named = jax.tree_util.tree_leaves_with_path(self.both)
        keys = [jax.tree_util.keystr(path[1:], simple=True, separator="/") for path, _ in named]
        arrays = [key for key, fixed in zip(keys, self._fixed, strict=True) if fixed is None]
        return list(zip(map(jax.tree_util.GetAttrKey, arrays), self._arrays, strict=True)), (
            self._structure,
            self._fixed,
        )

    @classmethod
    def tree_unflatten(cls, rest: tuple[object, object], arrays: Sequence[Leaf]) -> Arguments:
        """The inverse of `tree_flatten`."""
        made, (structure, fixed) = object.__new__(cls), rest
        vars(made).update(_structure=structure, _fixed=fixed, _arrays=tuple(arrays))
        return made

    def __repr__(self) -> str:
        positional, keywords = self.both
        return f"Arguments({', '.join([*map(repr, positional), *(f'{name}={x!r}' for name, x in keywords.items())])})"


def both_of(inputs: Inputs) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """(positional arguments, keyword arguments) of a layer that is called with these inputs."""
    return inputs[0].both if len(inputs) == 1 and isinstance(inputs[0], Arguments) else (inputs, {})
