"""Names each array of a training state by its layer, finds the first difference of two models, writes JSON.

A name is a path. Arrays that lie in two stages' buffers (`jpipe.memory.storage`) as

    state.variables["params"]           kernels of layers 0 1 | 2 3, biases of layers 0 1 | 2 3
    state.opt_state[1][0].mu            moments, laid out as these
    state.opt_state[1][0].count         a number

are in the checkpoint, a record (a layer, or layers that share its variables) after the other,

    layers/0000_Dense/params/kernel     optimizer/1/0/mu/0000_Dense/kernel
    layers/0000_Dense/params/bias       optimizer/1/0/mu/0000_Dense/bias        a `NamedRecord` of two trees:
    layers/0001_Dense/params/kernel     ...                                     layers/params and optimizer/1/0/mu
    optimizer/1/0/count                                                         `without_layer`

Variables that layers share are stored once, with the first layer that uses them. A model that is one module names its
own parameters, wherever it is cut; slices of a stacked one, which lie on several stages, end with their indices:

    model/params/h_3/attention/kernel   optimizer/1/0/mu/h_3/attention/kernel
    model/params/blocks/mlp/kernel/5    optimizer/1/0/mu/blocks/mlp/kernel/5

Beside the arrays is a `description`,
by which two models are told apart, and a layer's own tree put together again without its pipeline.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, groupby, product
from typing import Any, TypeAlias, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.cutting.whole import CutModel
from jpipe.jax.trees import Casts, cast_to
from jpipe.memory.layout import NO_PART, Layout, StageTree
from jpipe.memory.records import Arrays, Records
from jpipe.model.groups import Model
from jpipe.training.train_state import TrainState
from jpipe.types import Leaf, PyTree

Value = TypeVar("Value")
Json: TypeAlias = Any
"""Any value that `json.dumps` takes."""
Path = tuple[str, ...]
Named = dict[Path, Leaf]
"""Arrays, or their shapes, by path."""

LAYERS, MODEL, OPTIMIZER = "layers", "model", "optimizer"
NOTHING = ""
AT_ONCE = 1 / 8
"""How much of the state is copied at a time, as a share, when it is saved or restored."""
_OF_BUFFERS = "{} follows the pipeline's buffers, not its layers; wrap what keeps it in jpipe.per_layer(...)"


@dataclass(frozen=True, eq=False)
class NamedRecord:
    """The arrays of a layer, or of layers that share them, in all trees.

    Attributes:
      record_type, record: the record's place (`jpipe.memory.records`).
      users: the layers.
      shapes: the arrays by tree and path, as shapes with shardings, in the order of the leaves. Room in which nothing
        lies has a path that begins with `NOTHING`.
    """

    record_type: int
    record: int
    users: tuple[int, ...]
    shapes: dict[str, Named]

    @property
    def named(self) -> Named:
        """The arrays of all trees as shapes, by path."""
        named = {path: shape for named in self.shapes.values() for path, shape in named.items()}
        return {path: shape for path, shape in named.items() if path[0] != NOTHING}

    @property
    def num_bytes(self) -> int:
        """The bytes of all arrays of the record."""
        return sum(shape.size * shape.dtype.itemsize for shape in self.named.values())


@dataclass(frozen=True, eq=False)
class Contents:
    """The names of all arrays of a state, and where they are in it.

    Attributes:
      model: the layers.
      state: a state, or its shapes with shardings.
      cut: of a model that is one module, where it is cut.

    Raises:
      TypeError: a part of the optimiser's state lies like the parameters' buffers but isn't one, so that it can't be
        told apart by layers; or a leaf is no array of numbers.
    """

    model: Model
    state: TrainState
    cut: CutModel | None = None

    def __post_init__(self) -> None:
        for path, tree in self.trees.items():
            shape_of = lambda buffers: {name: getattr(buffers[name], "shape", None) for name in buffers}
            if shape_of(tree) != shape_of(tree.layout.shapes):
                raise TypeError(_OF_BUFFERS.format("/".join(path)))
        buffers = {shape.shape for shape in jax.tree.leaves(self.state.variables["params"].layout.shapes)}
        for path, leaf in self.without_layer.items():
            if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
                raise TypeError(f"{'/'.join(path)} is a {type(leaf).__name__}, not an array; a checkpoint holds arrays")
            if leaf.shape in buffers:
                raise TypeError(_OF_BUFFERS.format("/".join(path)))

    @cached_property
    def leaves(self) -> dict[Path, Leaf | StageTree]:
        """All leaves and trees of the state, in its order, by their paths: `(step,)`, `(optimizer, 0, mu)`."""
        leaves = jax.tree_util.tree_leaves_with_path(self.state, is_leaf=_is_tree)
        return {_path_of(keys): leaf for keys, leaf in leaves}

    @cached_property
    def trees(self) -> dict[Path, StageTree]:
        """The trees that are laid out by layers, by path: `(layers, params)`, `(optimizer, 0, mu)`."""
        return {path: leaf for path, leaf in self.leaves.items() if _is_tree(leaf)}

    @cached_property
    def without_layer(self) -> Named:
        """The arrays in the optimiser's state that belong to no layer, but for random keys."""
        belongs = lambda path, leaf: path[0] != OPTIMIZER or _is_tree(leaf) or is_key(leaf)
        return {path: leaf for path, leaf in self.leaves.items() if not belongs(path, leaf)}

    @cached_property
    def random_keys(self) -> Named:
        """The state's random key, as `(key,)`, and those in the optimiser's state."""
        return {path: leaf for path, leaf in self.leaves.items() if is_key(leaf)}

    @cached_property
    def num_bytes(self) -> int:
        """The bytes of the arrays of all layers."""
        return sum(record.num_bytes for record in self.each_record)

    @cached_property
    def records(self) -> Records:
        """The places of each layer's arrays, in all trees."""
        return _records_of(tuple(("/".join(path), tree.layout) for path, tree in self.trees.items()))

    @property
    def arrays(self) -> Arrays:
        """The buffers of all trees, as `records` takes them."""
        return {"/".join(path): dict(tree) for path, tree in self.trees.items()}

    def filled(self, arrays: Arrays, named: Named) -> TrainState:
        """The state made of these buffers and, by path, of all other arrays: `without_layer`, the step, random keys."""
        fill = lambda path, leaf: StageTree(arrays["/".join(path)], leaf.layout) if _is_tree(leaf) else named[path]
        leaves = [fill(path, leaf) for path, leaf in self.leaves.items()]
        return jax.tree.unflatten(jax.tree.structure(self.state, is_leaf=_is_tree), leaves)

    def layer_name(self, layer: int) -> str:
        """A layer's name in the checkpoint: its index and the name of its kind."""
        return f"{layer:04d}_{self.model.group_at(layer).layer.name.replace('/', '.')}"

    @cached_property
    def each_record(self) -> list[NamedRecord]:
        """The arrays of each layer, or of layers that share them, in the order of layers."""
        records = []
        for v, j, users in self.records.places:
            shapes, leaves = {}, self.records.leaves(v)
            for path, tree in self.trees.items():
                # An optimiser may keep other dtypes than the parameters'.
                dtypes = [tree[buffer].dtype for buffer in tree.layout.storage.record_types[v].buffers]
                pairs = zip(leaves["/".join(path)], dtypes, strict=True)
                structs = [lies.leaf.update(dtype=dtype, sharding=lies.sharding) for lies, dtype in pairs]
                shapes["/".join(path)] = dict(zip(self._paths(path, v, j, users[0]), structs, strict=True))
            records.append(NamedRecord(v, j, users, shapes))
        return records

    def portions(self) -> list[list[NamedRecord]]:
        """Runs of records of about `AT_ONCE` of the bytes each; a record is in the run that has its bytes' middle."""
        records = self.each_record
        ends = list(accumulate((record.num_bytes for record in records), initial=0))
        part = lambda i: int((ends[i] + ends[i + 1]) / 2 / max(1, AT_ONCE * ends[-1]))
        return [[records[i] for i in run] for _, run in groupby(range(len(records)), part)]

    def _paths(self, tree: Path, record_type: int, record: int, layer: int) -> Iterator[Path]:
        """The names of a record's leaves in a tree, in the order of the leaves."""
        if (whole := self.trees[tree].layout.model_tree) is not None:
            prefix = (MODEL, *tree[1:]) if tree[0] == LAYERS else tree
            for i, part in enumerate(whole.parts[record_type][record]):
                name = (*prefix, *whole.paths[part[0]], *map(str, part[1]))
                yield name if part != NO_PART else (NOTHING, *tree, str(i))
            return
        treedef, name = self.trees[tree].layout.treedefs[record_type], self.layer_name(layer)
        numbered, prefix = jax.tree.unflatten(treedef, range(treedef.num_leaves)), (*tree, name)
        if tree[0] == LAYERS:  # as the layer's own library names them, without metadata boxes
            numbered, prefix = self._unboxed(layer, {tree[1]: numbered}).get(tree[1], numbered), (LAYERS, name, tree[1])
        for number, (keys, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(numbered)):
            assert leaf == number, "another order than that of the leaves"
            yield (*prefix, *map(name_of, keys))

    def _unboxed(self, layer: int, variables: dict[str, PyTree]) -> dict[str, PyTree]:
        """A layer's variables by collection without Flax's metadata boxes."""
        kind = self.model.group_at(layer).layer
        return kind.from_item(kind.to_item(variables))

    def shapes(self) -> Named:
        """The arrays of layers and those in the optimiser's state as shapes with shardings, by path.

        Raises:
          ValueError: orbax, which joins paths with ".", would give two the same name.
        """
        shapes = dict(self.without_layer)
        for record in self.each_record:
            shapes |= record.named
        for name, count in Counter(map(".".join, shapes)).items():
            if count > 1:
                raise ValueError(f"two arrays would be called {name} in a checkpoint; rename one")
        return shapes

    def description(self) -> dict[str, Json]:
        """The layers and the arrays, by which two models are told apart, as JSON.

        Each layer has a name, the name of the layer that its variables are stored with, and how its own tree is put
        together: as `Pipeline.layer_variables` gives it, with the names of its arrays as leaves. A model that is one
        module has a name, and its own tree.
        """
        named = self.shapes() | self.random_keys
        arrays = [[list(path), leaf.dtype.name, list(leaf.shape)] for path, leaf in sorted(named.items())]
        if self.cut is None:
            return {"layers": self._layers(), "arrays": arrays}
        layer, trees = self.cut.whole.layer, {}
        for name in sorted(self.state.variables.keys() & self.cut.whole.unboxed.keys()):
            tree = self.state.variables[name].layout.model_tree
            assert tree is not None
            last = {part[0]: part[1] for part in sorted(chain.from_iterable(chain.from_iterable(tree.parts)))}
            stacked = [tuple(i + 1 for i in last[n]) for n in range(len(tree.paths))]
            leaves = [PathLeaf((MODEL, name, *path), counts) for path, counts in zip(tree.paths, stacked, strict=True)]
            trees[name] = jax.tree.unflatten(tree.treedef, leaves)
        item = to_json(layer.to_item(trees), lambda _, leaf: [list(leaf.path), list(leaf.stacked)])
        return {"model": {"name": layer.name, "item": item}, "arrays": arrays}

    def casts(self, saved: dict[str, Json]) -> dict[str, Casts]:
        """The dtypes in which a checkpoint has variables, by collection; none if it has others, or not all alike."""
        shapes, casts = self.shapes(), dict[str, Casts]()
        for path, name, _ in saved["arrays"]:
            if path[0] in (LAYERS, MODEL):
                own, of_collection = shapes.get(tuple(path)), casts.setdefault(path[1 if path[0] == MODEL else 2], {})
                if own is None or cast_to(of_collection, own.dtype, jnp.dtype(name)) != jnp.dtype(name):
                    return {}
        return casts

    def _layers(self) -> Json:
        records = {i: record for record in self.each_record for i in record.users}
        layers = []
        for i in range(self.model.num_layers):
            group = self.model.group_at(i)
            trees = {name: self._named(records[i], name) for name in self.state.variables if name in group.variables}
            item = to_json(group.layer.to_item(self._unboxed(i, trees)), lambda _, leaf: list(leaf.path))
            stored = self.layer_name(records[i].users[0]) if i in records else None
            layers.append({"name": self.layer_name(i), "stored": stored, "item": item})
        return layers

    def _named(self, record: NamedRecord, collection: str) -> PyTree:
        """A layer's tree of a collection, with the paths of its arrays as leaves."""
        treedef = self.state.variables[collection].layout.treedefs[record.record_type]
        return jax.tree.unflatten(treedef, map(PathLeaf, record.shapes[f"{LAYERS}/{collection}"]))


@lru_cache(maxsize=4)
def _records_of(layouts: tuple[tuple[str, Layout], ...]) -> Records:
    """Returns the same object for the same layouts, since it keeps the functions that were compiled for them."""
    return Records(dict(layouts))


def _path_of(keys: tuple[object, ...]) -> Path:
    """The path in a checkpoint of a part of a state, from its keys in the state."""
    field, *rest = map(name_of, keys)
    if field == "opt_state":
        return (OPTIMIZER, *(rest or ["state"]))
    return (LAYERS if field == "variables" else field, *rest)


def is_key(leaf: object) -> TypeGuard[jax.Array]:
    """Whether it is a random key, or the shape of one."""
    return jnp.issubdtype(getattr(leaf, "dtype", int), jax.dtypes.prng_key)


def _is_tree(node: object) -> TypeGuard[StageTree]:
    return isinstance(node, StageTree)


@dataclass(frozen=True)
class PathLeaf:
    """A path as a leaf of a pytree.

    Attributes:
      path: that of the array.
      stacked: how many slices of it there are along each of its first dimensions, if slices of it are stored, whose
        indices end their paths.
    """

    path: Path
    stacked: tuple[int, ...] = ()


def own_trees(description: Json, arrays: Named) -> list[PyTree]:
    """Each layer's own tree, or the tree of a model that is one module, of arrays on the host, which are named."""

    def stacked(path: list[str], counts: list[int]) -> np.ndarray:
        slices = [arrays[*path, *map(str, indices)] for indices in product(*map(range, counts))]
        return np.stack(slices).reshape(*counts, *slices[0].shape) if counts else slices[0]

    if "model" in description:
        return [from_json(description["model"]["item"], lambda leaf: stacked(*leaf))]
    return [from_json(layer["item"], lambda path: arrays[tuple(path)]) for layer in description["layers"]]


def first_difference(saved: dict[str, Json], wanted: dict[str, Json]) -> str | None:
    """The first difference between two models' descriptions, in words; None if there is none.

    Args:
      saved: the checkpoint's description.
      wanted: the pipeline's description.
    """
    there, here = _facts(saved), _facts(wanted)
    for name in sorted({**there, **here}, key=lambda name: name if "/" in name else ""):  # layers, then arrays by name
        if there.get(name) != here.get(name):
            told = f"{there.get(name, 'missing')} in the checkpoint and {here.get(name, 'missing')} in the pipeline"
            return f"{name} is {told}"
    return None


def _facts(description: dict[str, Json]) -> dict[str, str]:
    """Lists by name by what two models are told apart: their kind, the layers, the shape of each array."""
    facts = {"its model": "one module" if "model" in description else "a list of layers"}
    for i, layer in enumerate(description.get("layers", [])):
        facts |= {f"layer {i}": layer["name"], f"the layer that stores the variables of layer {i}": layer["stored"]}
    return facts | {"/".join(path): f"{dtype}{shape}" for path, dtype, shape in description["arrays"]}


# --- pytrees as JSON --------------------------------------------------------------------------------------------------


def _value_to_json(path: Path, value: object) -> Json:
    """Writes a number, string, bytes or array as JSON.

    Raises:
      TypeError: the value is none of these.
    """
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    is_array = isinstance(value, np.ndarray | np.generic | jax.Array) and not is_key(value)
    array = np.asarray(value) if is_array else None
    if array is None or array.dtype.kind not in "biufc":
        what = type(value).__name__ if array is None else f"array of {array.dtype}"
        raise TypeError(
            f"the position holds a {what} at {'/'.join(path) or 'its root'}; pass numbers, strings, bytes and arrays"
        )
    return {"array": [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]}


def _value_from_json(encoded: Json) -> Leaf:
    """The inverse of `_value_to_json`."""
    ((kind, value),) = encoded.items()
    if kind == "value":
        return value
    if kind == "bytes":
        return base64.b64decode(value)
    dtype, shape, data = value
    return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()


def to_json(tree: PyTree, leaf_to_json: Callable[[Path, Leaf], Json] = _value_to_json) -> Json:
    """Writes a pytree of dicts, lists and tuples as JSON.

    Args:
      tree: the pytree. Other containers become dicts by the names of their fields.
      leaf_to_json: `(path, leaf) -> JSON`; default: of numbers, strings, bytes and arrays.

    Raises:
      TypeError: a dict's key is no string or number.
    """

    def convert(path: Path, node: PyTree) -> Json:
        """Writes a part of the tree, and all below it; `path` leads to it."""
        if node is None:
            return {"none": True}
        children = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
        if len(children) == 1 and not children[0][0]:
            return {"leaf": leaf_to_json(path, node)}
        items = [convert((*path, name_of(key)), child) for (key,), child in children]
        if isinstance(node, list) or type(node) is tuple:
            return {"list" if isinstance(node, list) else "tuple": items}
        keys = [key.key if isinstance(key, jax.tree_util.DictKey) else name_of(key) for (key,), _ in children]
        if strange := [key for key in keys if type(key) not in (str, int, float, bool)]:
            where = "/".join(path) or "the root"
            raise TypeError(f"a dict at {where} has the key {strange[0]!r}; use strings or numbers")
        return {"dict": list(map(list, zip(keys, items, strict=True)))}

    return convert((), tree)


def from_json(encoded: Json, leaf_from_json: Callable[[Json], Leaf] = _value_from_json) -> PyTree:
    """The inverse of `to_json`; `leaf_from_json` is the inverse of its `leaf_to_json`."""
    ((kind, value),) = encoded.items()
    read = lambda child: from_json(child, leaf_from_json)
    if kind == "dict":
        return {key: read(child) for key, child in value}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(map(read, value))
    return None if kind == "none" else leaf_from_json(value)


def name_of(key: object) -> str:
    """A key of a pytree's path as text: `kernel`, `0`."""
    return jax.tree_util.keystr((key,), simple=True)
