"""`Layout` and `StageTree`: which buffers hold the variables, as global arrays split over the stages.

Optax, checkpoints and users hold `StageTree`s: pytrees of arrays `[K, ...]` split over `stage`, which know their
`Layout`. `jpipe.memory.records` makes them from the layers' own trees, and takes these out of them again.

*At rest*, between steps, arrays are split over all mesh axes that their specs name. Weights that only the first or only
the last stage holds may be split over `stage` too: then an array `[1, ...]` holds them, each stage has a part, and no
other stage has room for them. `jpipe.memory.at_work` brings them to where a step uses them.

A `ScatteredLeaf` of one stage is split over all stages, along the largest dimension that K divides. So whole states go
to another layout, to a checkpoint and back, while no device holds more than its part. Arrays on the hosts are cut into
slices (`slices_of`), of which a device holds a few, never all.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jpipe.jax.in_place import HOST, Index, each, is_apart, is_whole, put_slice, to_host
from jpipe.jax.trees import is_float
from jpipe.memory.storage import Buffers, Storage, build_storage
from jpipe.model.groups import WEIGHTS, Model, role_of
from jpipe.partitioner.axes import AXIS, on_all_stages, on_stages, spec_of
from jpipe.partitioner.shardings import Shape, names_in
from jpipe.partitioner.splits import SMALLEST
from jpipe.schedules.actions import Placement
from jpipe.types import Leaf, PyTree, Structure


@dataclass(frozen=True)
class ScatteredLeaf:
    """How a leaf of one stage is shared out among all stages.

    Attributes:
      leaf: its shape.
      spec: how it is split over other mesh axes; if also over `stage`, every stage has its part already (`lies_so`).
      mesh: the devices.
    """

    leaf: jax.ShapeDtypeStruct
    spec: PartitionSpec
    mesh: Mesh

    @property
    def lies_so(self) -> bool:
        """Whether every stage has its part already."""
        return on_all_stages(self.spec)

    @property
    def dimension(self) -> int | None:
        """The dimension along which it is to be split over the stages, besides its other splits."""
        if self.lies_so:
            return None
        parts, num_stages = NamedSharding(self.mesh, self.spec).shard_shape(self.leaf.shape), self.mesh.shape[AXIS]
        fitting = [d for d, n in enumerate(parts) if n and n % num_stages == 0 and num_stages > 1]
        return max(fitting, key=lambda d: parts[d], default=None)

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of the leaf once it is shared out."""
        entries = [list(names_in(entry)) for entry in self.spec] + [[] for _ in self.leaf.shape[len(self.spec) :]]
        if self.dimension is not None:
            entries[self.dimension].append(AXIS)
        return NamedSharding(self.mesh, spec_of(entries))

    def scatter(self, leaf: jax.Array, is_mine: jax.Array | bool) -> jax.Array:
        """A device's part of the leaf, whichever stage has it (`is_mine` is true on that stage alone)."""
        if self.lies_so:
            return leaf
        if leaf.dtype == jnp.bool_:
            return self.scatter(leaf.astype(jnp.int8), is_mine).astype(jnp.bool_)
        leaf = jnp.where(is_mine, leaf, jnp.zeros_like(leaf))
        if self.dimension is not None:
            return jax.lax.psum_scatter(leaf, AXIS, scatter_dimension=self.dimension, tiled=True)
        return jax.lax.psum(leaf, AXIS)

    def unscatter(self, part: jax.Array) -> jax.Array:
        """The inverse of `scatter`: the leaf, as each stage has it, from a device's part."""
        return part if self.dimension is None else jax.lax.all_gather(part, AXIS, axis=self.dimension, tiled=True)

    def put(self, leaf: Leaf) -> jax.Array:
        """Shares a leaf out: each device gets its part, also of a leaf on the host or whole in this process.

        Raises:
          ValueError: it is split over other devices, and this process has only a part.
        """
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set == self.sharding.device_set:
            return jax.device_put(leaf, self.sharding)
        if not is_whole(leaf):
            raise ValueError(
                f"an array {leaf.dtype}{list(leaf.shape)} is split over {len(leaf.sharding.device_set)} devices other "
                "than those of the pipeline's mesh, and this process has only a part; bring it to the hosts first: "
                "jax.experimental.multihost_utils.process_allgather(array, tiled=True)"
            )
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, self.sharding, lambda index: whole[index])


SUBLANES = 32
"""A multiple of the rows of a TPU's tiles, whatever the dtype."""
LANES = 128
"""The entries of the innermost dimension of a TPU's tiles."""
SLICE_BYTES = 2**23
"""The most bytes of an array that go to the host or come from there at once, if they can be so few; a few such slices
are on the device."""


def slices_of(shape: tuple[int, ...], itemsize: int, mesh: Mesh | AbstractMesh) -> tuple[Shape, int]:
    """How a device's part of a buffer is cut into slices that go to the host and come from there.

    A TPU's compiler moves slices of one dimension alone, so dimensions before it are merged with it:

        [1, 4, 96, 256], cut to [256] each 8:       [1, 384, 256], rows 0..31 | 32..63 | ...

    It aborts on slices that aren't one piece of memory: there a table is only cut if it fills whole tiles.

    Args:
      shape: `[1, ...]`.
      itemsize: bytes of an element.
      mesh: the devices; they may be a TPU's if they aren't known.

    Returns:
      (the shape with dimensions merged, `[1, rows, ...]`, how many rows a slice has; some may be left over).
    """
    last, row = len(shape) - 1, lambda dim: itemsize * math.prod(shape[dim + 1 :])
    cut = max(1, last - 1)  # the dimension of a table's rows
    # Where a TPU would pad the last dimension, it may have the rows innermost, each entry's own.
    unit = SUBLANES if last > 1 and shape[last] % LANES == 0 else LANES
    fills_tiles = shape[cut] % unit == 0 and (unit == SUBLANES or math.prod(shape[1:cut]) == 1)
    fills_tiles |= isinstance(mesh, Mesh) and mesh.devices.flat[0].platform != "tpu"
    dim = next((dim for dim in range(1, cut + fills_tiles) if row(dim) <= SLICE_BYTES), cut - 1 + fills_tiles)
    rows, unit = math.prod(shape[1 : dim + 1]), unit if dim == cut else 1
    return (1, rows, *shape[dim + 1 :]), min(rows, max(SLICE_BYTES // row(dim) // unit, 1) * unit)


def zeros_on_host(shape: tuple[int, ...], dtype: np.dtype, mesh: Mesh | AbstractMesh) -> jax.Array:
    """Zeros in the memory of the host, of which only slices are made on the device."""
    view, size = slices_of(shape, dtype.itemsize, mesh)
    count, rest = divmod(view[1], size)
    zeros = lambda rows: jnp.zeros((1, rows, *view[2:]), dtype)
    write = lambda i, zeros, array: put_slice(array, zeros, (0, i * size))
    array = each(0, count, zeros(size), write, to_host(jax.lax.empty(view, dtype)))
    return each(count, count + (rest > 0), zeros(rest), write, array).reshape(shape)


def zeros_like(array: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of the shape and the sharding of an array; those on the hosts are never whole on the devices."""
    if array.sharding.memory_kind != HOST:
        return jnp.zeros(array.shape, array.dtype, device=array.sharding)
    part = array.sharding.shard_shape(array.shape)
    mesh = cast(Mesh, array.sharding.mesh)
    make = on_stages(lambda: zeros_on_host(part, array.dtype, mesh), mesh, (), array.sharding.spec)
    return jax.jit(make, out_shardings=array.sharding)()


ModelPart = tuple[int, tuple[int, ...]]
"""(The index of a leaf of a model's tree, where it is sliced along its first dimensions if it is only a slice)."""
NO_PART: ModelPart = (-1, ())
"""Room in which nothing lies."""


@dataclass(frozen=True)
class ModelTree:
    """The tree of a model that is one module, and what of it each leaf of each layer is.

    Attributes:
      treedef: the structure of the tree.
      parts: for each set, instance and leaf, what lies there.
    """

    treedef: Structure
    parts: tuple[tuple[tuple[ModelPart, ...], ...], ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.treedef, self.parts))

    @cached_property
    def paths(self) -> list[tuple[str, ...]]:
        """The path of each leaf of the tree."""
        numbered = jax.tree.unflatten(self.treedef, range(self.treedef.num_leaves))
        in_words = lambda path: tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        return [in_words(path) for path, _ in jax.tree_util.tree_leaves_with_path(numbered)]


@dataclass(frozen=True)
class Layout:
    """Where the variables of each layer lie, for one collection.

    It is the static part of a `StageTree`, which JAX hashes and compares: its fields have to be hashable.

    Attributes:
      storage: the places within a stage, with a record type for each set of variables (`jpipe.model.groups`) and a
        record for each of its instances.
      treedefs: for each set, the structure of a layer's tree.
      users: for each set and instance, the indices of the layers that use it.
      mesh: the devices.
      model_tree: of a model that is one module, its own tree; None for a list of layers.
      state_on_hosts: whether an optimiser's state for these variables lies in the memory of the hosts.
    """

    storage: Storage
    treedefs: tuple[Structure, ...]
    users: tuple[tuple[tuple[int, ...], ...], ...]
    mesh: Mesh
    model_tree: ModelTree | None = None
    state_on_hosts: bool = False

    @property
    def num_stages(self) -> int:
        """K, the number of stages."""
        return self.mesh.shape[AXIS]

    @cached_property
    def specs(self) -> dict[str, PartitionSpec]:
        """PartitionSpecs of the global arrays."""
        first = lambda spec: None if on_all_stages(spec) else AXIS
        return {name: PartitionSpec(first(buffer.spec), *buffer.spec) for name, buffer in self.storage.named_buffers}

    @cached_property
    def shapes(self) -> StageTree:
        """ShapeDtypeStructs of the global arrays `[K or 1, size, ...]`, with their shardings."""
        shapes = {}
        for name, buffer in self.storage.named_buffers:
            shape = (1 if on_all_stages(buffer.spec) else self.num_stages, *buffer.shape)
            sharding = NamedSharding(self.mesh, self.specs[name])
            shapes[name] = jax.ShapeDtypeStruct(shape, buffer.dtype, sharding=sharding)
        return StageTree(shapes, self)

    def zeros(self) -> Buffers:
        """A device's own part of zero buffers, inside of a program on all devices."""
        return {n: part_zeros(a.shape, a.spec, self.mesh, a.dtype) for n, a in self.storage.named_buffers}

    def zeros_of_state(self) -> Buffers:
        """The same, if these are a state of `jpipe.per_layer`: where that lies."""
        zeros, hosted = self.zeros(), self.state_on_hosts and is_apart(self.mesh)
        for name, buffer in self.storage.named_buffers if hosted else ():
            if may_go(buffer, buffer, by_layer=True):
                zeros[name] = zeros_on_host(zeros[name].shape, buffer.dtype, self.mesh)
        return zeros


SMALLEST_RECORD = 2**10
"""The fewest elements of a leaf that goes layer by layer. A TPU's compiler moves no slices of narrower arrays."""


def may_go(leaf: Leaf, buffer: Leaf, *, by_layer: bool) -> bool:
    """Whether a leaf of an optimiser's state can lie on the hosts: floats of the shape of their buffer.

    Args:
      leaf: it, or its shape and dtype.
      buffer: `[K, ...]`; of leaves of two dimensions and more `[K, entries, ...]`.
      by_layer: whether a layer's part goes and comes at once (`jpipe.per_layer`), not slices of all layers'.
    """
    is_wide = len(buffer.shape) >= 4 and math.prod(buffer.shape[2:]) >= SMALLEST_RECORD
    return leaf.shape == buffer.shape and is_float(leaf) and (is_wide or not by_layer)


NOT_SAVED = (
    "a pipeline's variables and states lie as its own devices need it, so they aren't pickled or serialised as they "
    "are; save tree = jax.device_get(pipe.model_variables(variables)), and load it by "
    "pipe.from_model_variables(tree, batch), of a list by layer_variables and from_layer_variables; or save a state by "
    "jpipe.Checkpointer(directory).save(pipe, state)"
)


TELLS_APART = (
    "tx tells parameters apart ({}), but a pipeline keeps many layers' leaves in one array; wrap that part of it in "
    "jpipe.per_layer(...), as in optax.chain(optax.clip_by_global_norm(1.0), jpipe.per_layer(optax.lamb(1e-3)))"
)


class TellsApartError(ValueError):
    """An optimiser tells the parameters of a pipeline apart."""


class PerLayerError(TypeError):
    """`jpipe.per_layer` can't work on what it is given."""


class _Choice(tuple[str, ...]):
    """The names of buffers for each of which a tree has a bool or a word: a mask, or labels.

    JAX compares them with those of parameters where a function takes a leaf of each: an optimiser must not.
    """

    __hash__ = tuple.__hash__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Choice):
            raise TellsApartError(TELLS_APART.format("by a mask, or labels"))
        return super().__eq__(other)


@jax.tree_util.register_pytree_with_keys_class
class StageTree(dict):
    """Variables of all layers under a layout: arrays `[K, ...]` split over `stage`, by buffer (`jpipe.memory.storage`).

    A pytree. Places that no layer owns hold zeros, and keep them under elementwise operations that map 0 to 0, so that
    sums and norms over all elements are exact.
    """

    def __init__(self, buffers: Mapping[str, Leaf], layout: Layout):
        super().__init__(buffers)
        self.layout = layout

    def __copy__(self) -> StageTree:
        return StageTree(dict(self), self.layout)

    def __deepcopy__(self, memo: dict[int, object]) -> StageTree:
        return StageTree(copy.deepcopy(dict(self), memo), self.layout)

    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_SAVED)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[object, Leaf]], tuple[tuple[str, ...], Layout]]:
        """Returns the arrays in the order of their names, each with its key, and the static part: names and layout."""
        names = (_Choice if any(isinstance(leaf, bool | str) for leaf in self.values()) else tuple)(sorted(self))
        return [(jax.tree_util.DictKey(name), self[name]) for name in names], (names, self.layout)

    @classmethod
    def tree_unflatten(cls, static: tuple[tuple[str, ...], Layout], leaves: Sequence[Leaf]) -> StageTree:
        """The inverse of `tree_flatten_with_keys`."""
        names, layout = static
        return cls(dict(zip(names, leaves, strict=True)), layout)


def laid_out(tree: PyTree, *, state_on_hosts: bool) -> PyTree:
    """The same tree, whose `StageTree`s say whether an optimiser's state lies on the hosts. No array moves."""

    def of_node(node: Leaf | StageTree) -> Leaf | StageTree:
        if not isinstance(node, StageTree) or node.layout.state_on_hosts == state_on_hosts:
            return node
        return StageTree(node, replace(node.layout, state_on_hosts=state_on_hosts))

    return jax.tree.map(of_node, tree, is_leaf=lambda node: isinstance(node, StageTree))


def make_layouts(
    model: Model, bounds: Sequence[tuple[int, int]], placement: Placement, mesh: Mesh, *, ends: str
) -> dict[str, Layout]:
    """The layout of each collection for a model cut into virtual stages.

    Record type v of each is `model.variable_sets[v]`. Variables that layers share lie on the first one's stage.

    Args:
      model: the traced layers.
      bounds: for each virtual stage, its first layer and one past its last.
      placement: on which stage each virtual stage is.
      mesh: with K devices along `stage`.
      ends: which weights are split over all stages: none ("own"), those that only the first or only the last stage
        holds ("spread"), or those that only the first and the last layer use ("shared").
    """
    stage_of = [placement.stage_of(s) for s, (start, stop) in enumerate(bounds) for _ in range(start, stop)]
    groups = [model.groups[variables.group] for variables in model.variable_sets]
    users = tuple(variables.users for variables in model.variable_sets)
    owners = [[stage_of[layers[0]] for layers in records] for records in users]
    if ends == "spread":
        is_split = [{*stages} in ({stage_of[0]}, {stage_of[-1]}) for stages in owners]
    else:
        last = len(stage_of) - 1
        is_split = [ends == "shared" and set().union(*records) <= {0, last} for records in users]
    layouts = {}
    for name in ["params", *sorted({name for group in groups for name in group.variables} - {"params"})]:
        trees = [group.variables.get(name, {}) for group in groups]
        leaves = [jax.tree.leaves(tree) for tree in trees]
        specs = [group.specs.get(name, []) for group in groups]
        for v, group in enumerate(groups):
            if is_split[v] and role_of(name, group.rules) in WEIGHTS:
                specs[v] = [_spread(*pair, mesh, ends) for pair in zip(leaves[v], specs[v], strict=True)]
        storage = build_storage(leaves, owners, device_of=range(placement.num_stages), specs=specs)
        layouts[name] = Layout(storage, tuple(map(jax.tree.structure, trees)), users, mesh)
    return layouts


def _spread(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec, mesh: Mesh, ends: str) -> PartitionSpec:
    """A leaf's spec at rest, split over all stages too unless it is small, or has no dimension that K divides.

    Leaves that all stages use together are split into runs over stages first, and each run over other axes: else a
    stage's part of a vocabulary would be in many pieces once those axes are gathered.
    """
    if leaf.size < SMALLEST:
        return spec
    spread = ScatteredLeaf(leaf, spec, mesh).sharding.spec
    if ends == "spread":
        return spread
    return spec_of([sorted(names_in(entry), key=lambda name: name != AXIS) for entry in spread])


def part_zeros(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh, dtype: np.dtype) -> jax.Array:
    """A device's own part of an array of zeros, whose whole shape is given."""
    return jnp.zeros(NamedSharding(mesh, spec).shard_shape(shape), dtype)


def drop_stage_axis(tree: PyTree) -> PyTree:
    """A stage's own buffers `[...]` out of its part `[1, ...]` of global arrays `[K, ...]`."""
    return jax.tree.map(lambda a: a[0], tree)


def add_stage_axis(tree: PyTree) -> PyTree:
    """The inverse of `drop_stage_axis`."""
    return jax.tree.map(lambda a: a[None], tree)


def device_index(mesh: Mesh) -> Index:
    """The index of this stage, inside of a program on the stages; a Python integer if there is only one."""
    return 0 if mesh.shape[AXIS] == 1 else jax.lax.axis_index(AXIS)
