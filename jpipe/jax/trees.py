"""Names the leaves of pytrees, compares pytrees and Python values, and decides on the dtypes of leaves."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.types import Leaf, PyTree

Casts = dict[np.dtype, np.dtype]
"""From dtypes of a model's variables to those in which users give them."""


def named_leaves(what: str, tree: PyTree) -> list[tuple[str, Leaf]]:
    """The leaves of a pytree, each with its name as a user would write it.

    >>> named_leaves("batch", {"inputs": 0, "targets": 1})
    [("batch['inputs']", 0), ("batch['targets']", 1)]
    """
    return [(what + jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def lists_in(what: str, tree: PyTree) -> list[str]:
    """The names of the outermost lists in a pytree.

    >>> lists_in("batch", {"inputs": [[0], [1]], "targets": (2,)})
    ["batch['inputs']"]
    """
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, list))
    return [what + jax.tree_util.keystr(path) for path, node in nodes if isinstance(node, list)]


def check_same_structure(what: str, tree: PyTree, expected: PyTree) -> None:
    """Compares two pytrees' structures.

    Raises:
      ValueError: naming the first leaf that one has and the other lacks.
    """
    if jax.tree.structure(tree) == jax.tree.structure(expected):
        return
    now, then = ([name for name, _ in named_leaves(what, one)] for one in (tree, expected))
    missing, extra = [name for name in then if name not in now], [name for name in now if name not in then]
    lacks = [f"it lacks {_listed(missing, 1)}"] if missing else []
    has = [f"it has {_listed(extra, 1)} besides"] if extra else []
    fault = " and ".join(lacks + has)
    if not fault or 0 < len(missing) == len(then):
        fault = f"it is {outline(what, tree, 1)}, not {outline(what, expected, 1)}"
    raise ValueError(f"the {what} has another structure than at init: {fault}")


def outline(what: str, tree: PyTree, most: int = 8) -> str:
    """The names of a pytree's first leaves as a user would write them, and of the container that holds them.

    >>> outline("batch", {"inputs": 0, "targets": 0}), outline("batch", (0, 0)), outline("batch", 0)
    ("batch['inputs'], batch['targets'] in a dict", 'batch[0], batch[1] in a tuple', 'a bare array')
    """
    names = [name for name, _ in named_leaves(what, tree)]
    return "a bare array" if names == [what] else f"{_listed(names, most)} in a {type(tree).__name__}"


def _listed(names: list[str], most: int) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def check_same_shapes(what: str, tree: PyTree, expected: PyTree, casts: Casts | None = None) -> None:
    """Compares two pytrees' structures, and then shapes and dtypes leaf by leaf.

    Args:
      what: the name of the tree.
      tree, expected: both.
      casts: the dtypes that leaves were given in so far, to which those of `tree` are added; None if all have to have
        the dtypes that are expected.

    Raises:
      ValueError: naming the first leaf that differs, or that was given in another dtype than those before it.
    """
    check_same_structure(what, tree, expected)
    for (name, leaf), want in zip(named_leaves(what, tree), jax.tree.leaves(expected), strict=True):
        shape, dtype = np.shape(leaf), jnp.result_type(leaf)
        if shape != want.shape:
            raise ValueError(f"{name} has the shape {shape}, not {want.shape} as at init")
        wanted = want.dtype if casts is None else cast_to(casts, want.dtype, dtype)
        if dtype != wanted:
            remedy = "as at init; cast it back" if wanted == want.dtype else "as those before it; cast all alike"
            raise ValueError(f"{name} has the dtype {dtype}, not {wanted} {remedy}")


def cast_to(casts: Casts, expected: np.dtype, dtype: np.dtype) -> np.dtype:
    """The dtype in which leaves of an expected one have to be given: of floats that of the first leaf, this one's."""
    floats = all(jnp.issubdtype(one, jnp.floating) for one in (expected, dtype))
    return casts.setdefault(np.dtype(expected), np.dtype(dtype)) if floats else expected


def are_others(casts: Mapping[str, Casts]) -> bool:
    """Whether any dtypes, by collection, were given in others."""
    return any(old != new for of_collection in casts.values() for old, new in of_collection.items())


def bytes_of(tree: PyTree) -> int:
    """The bytes of a pytree's arrays, or of arrays of such shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


# --- dtypes -----------------------------------------------------------------------------------------------------------


def is_float(leaf: Leaf) -> bool:
    """Whether a leaf (an array, or its shape and dtype) is floating-point or complex: then it has gradients."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def accumulator_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype in which values of `dtype` are summed: float32 for narrower floats, `dtype` itself for all others."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4
    return np.dtype(np.float32) if narrow else dtype


def nested(paths: Iterable[tuple[tuple[str, ...], Leaf]]) -> PyTree:
    """Nested dicts of values by their paths.

    >>> nested([(("a", "b"), 0), (("a", "c"), 1), (("d",), 2)])
    {'a': {'b': 0, 'c': 1}, 'd': 2}
    """
    tree: PyTree = {}
    for (*folders, name), value in paths:
        functools.reduce(lambda inner, folder: inner.setdefault(folder, {}), folders, tree)[name] = value
    return tree


# --- Python values, part by part --------------------------------------------------------------------------------------

# A function made twice from the same values is two objects that aren't equal, as are layers built of such functions. So
# values are taken apart, down to parts that Python or a library compares. Both are compared as they are now; an object
# that both hold isn't taken apart.

LIBRARIES = ("jpipe", "optax", "jax", "jaxlib", "flax", "chex", "numpy", "builtins")
"""Packages with objects whose `==` compares all that matters."""


def same_value(a: object, b: object, pending: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Whether two Python values have the same types and bits all the way down, so that code can't tell them apart.

    Unlike `==`, which takes 0.0 for -0.0, 1 for True, and nan for another value than itself. Arrays are the same only
    if they are one object; dataclasses, if their fields are; other objects of libraries, if their class says so by
    `==`. A user's `==` may leave out what matters.

    >>> same_value((1, {"a": float("nan")}), (1, {"a": float("nan")})), same_value((0.0,), (-0.0,)), same_value(1, True)
    (True, False, False)

    Functions are the same if the same line of code made them from the same values.

    >>> same_value(*[lambda x: x + 1 for _ in range(2)])
    True

    Args:
      a: one value.
      b: the other.
      pending: the pairs, by identity, that are being compared, for functions and containers that hold themselves.
    """
    if a is b or (id(a), id(b)) in pending:
        return True
    if type(a) is not type(b):
        return False
    first, second = _parts(a), _parts(b)
    pending |= {(id(a), id(b))}
    if first is None or second is None:
        return _is_equal(a, b)
    return len(first) == len(second) and all(same_value(x, y, pending) for x, y in zip(first, second, strict=False))


def values_within(value: object, seen: set[int] | None = None) -> Iterator[object]:
    """Yields the value and all of its parts, as `same_value` compares them.

    Args:
      value: any Python value.
      seen: the ids of values whose parts were given already, for those that hold themselves.
    """
    seen = set() if seen is None else seen
    yield value
    if id(value) not in seen:
        seen.add(id(value))
        for part in _parts(value) or ():
            yield from values_within(part, seen)


def _parts(value: object) -> Sequence[object] | None:
    """Lists the parts of a value, to be compared one by one; None if it is compared as a whole."""
    match value:
        case float() | complex() | np.generic():
            return [str(np.asarray(value).dtype), np.asarray(value).tobytes()]
        case tuple() | list():
            return list(value)
        case Mapping():
            return [part for item in value.items() for part in item]
        case functools.partial():
            return [value.func, value.args, value.keywords]
        case set() | frozenset():
            return sorted(value, key=lambda item: f"{type(item)} {item!r}")
        case FunctionType():
            try:
                enclosed = [variable.cell_contents for variable in value.__closure__ or ()]
            except ValueError:  # a variable isn't set yet
                return None
            defaults = [value.__defaults__, value.__kwdefaults__]
            return [value.__code__, id(value.__globals__), *defaults, enclosed, value.__dict__]
    if dataclasses.is_dataclass(value) and type(value).__eq__ is not object.__eq__:
        # Linen modules are dataclasses; the module that one is a part of is no part of it.
        return [getattr(value, field.name, None) for field in dataclasses.fields(value) if field.name != "parent"]
    return None


def _is_equal(a: object, b: object) -> bool:
    """Whether two objects without parts are equal, as their class says. An array is equal to itself alone."""
    library, *_ = type(a).__module__.split(".")
    return library in LIBRARIES and not isinstance(a, jax.Array | np.ndarray) and (a == b) is True
