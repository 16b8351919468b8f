"""The table `RULES`: how each operation may be carried out on shards; all rules but those of look-ups (`rule`).

A rule takes an equation of whole arrays, how each operand lies along one mesh axis (a `Shard`, REPLICATED or PARTIAL),
and the axis. It returns a `RuleResult`: how the operands have to lie, how the results lie then, and perhaps what a
device does `instead` of the plain operation. It returns None if the operation has to see whole arrays, which an
operation without a rule always does. Rules are asked while a plan is made (`way_by_rule`), for one axis
after the other. `part_params` is asked later, when a device's operation is traced.

Rules of look-ups have a file of their own (`jpipe.partitioner.rule`). Of the others, elementwise operations keep
shards, and linear ones leave partial sums partial. Products keep shards, and a split sum gives partial sums. Most other
operations leave some dimensions alone, and may be carried out on shards of these.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpipe.jax.flat_jaxpr import aval_of, operand_shape, result_shape
from jpipe.jax.primitives import ELEMENTWISE, JaxprEqn, Literal
from jpipe.partitioner.rule import LOOK_UPS, Labels, Operation, Rule, RuleResult, by_labels, on_partial
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, AxisSharding, Shape, Shard


def _where_equal(first: Sequence[object], second: Sequence[object]) -> Labels:
    """Labels each dimension where both agree on it, as in their sizes, by its own number."""
    return [dim if a == b else None for dim, (a, b) in enumerate(zip(first, second, strict=True))]


# --- elementwise operations ---


def elementwise(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
    """Lets the result lie as the largest operand that is a shard; operands that are broadcast to it are replicated.

    Without a shard, a result that is linear in partial operands is partial. Those have to be as large as the result: a
    sum is best taken before it is broadcast.
    """
    shape, shapes = result_shape(equation), [operand_shape(equation, i) for i in range(len(shardings))]
    labels = [_where_equal(s, shape) if len(s) == len(shape) else [None] * len(s) for s in shapes]
    largest_first = sorted(range(len(shapes)), key=lambda i: -math.prod(shapes[i]))
    split = by_labels(labels, [range(len(shape))], shardings, largest_first)
    partial = [s == PARTIAL for s in shardings]
    linear = _LINEAR.get(equation.primitive.name)
    partial_shapes = {s for s, is_partial in zip(shapes, partial, strict=True) if is_partial}
    return linear(equation, partial, axis) if linear and not split and partial_shapes == {shape} else split


def _sum(equation: JaxprEqn, partial: Sequence[bool], axis: Axis) -> RuleResult:
    """Answers for a sum of operands, or a linear function of one: operands that aren't partial are made so."""
    return RuleResult([PARTIAL] * len(partial), [PARTIAL])


def _cast(equation: JaxprEqn, partial: Sequence[bool], axis: Axis) -> RuleResult | None:
    """The rule of casts: sums stay partial in a cast of floating-point numbers to a type as wide in range as float32.

    Over data axes they do in a cast to narrower types too.

    So a gradient of narrow parameters is rounded on each device, as it is for each micro-batch, and summed once a step.
    In other casts the sum is taken first. Its value is often used without the cast too, as by a norm and the residual
    connection around it, and would be added up twice, once in the wider type. Integers wrap around in each part.
    """
    old, new = aval_of(equation.invars[0]).dtype, aval_of(equation.outvars[0]).dtype
    floats = jnp.issubdtype(old, jnp.inexact) and jnp.issubdtype(new, jnp.inexact)
    as_large = floats and jnp.finfo(new).maxexp >= jnp.finfo(jnp.float32).maxexp
    widens = floats and jnp.finfo(new).bits >= jnp.finfo(old).bits
    return _sum(equation, partial, axis) if as_large and (axis.is_data or (axis.sums_late and widens)) else None


def _product(equation: JaxprEqn, partial: Sequence[bool], axis: Axis) -> RuleResult | None:
    """Answers for a product of one partial sum and a whole array: the product of two sums isn't the sum of products."""
    operands = [PARTIAL if is_partial else REPLICATED for is_partial in partial]
    return RuleResult(operands, [PARTIAL]) if sum(partial) == 1 else None


def _quotient(equation: JaxprEqn, partial: Sequence[bool], axis: Axis) -> RuleResult | None:
    """Answers for a quotient of floating-point numbers by a constant other than zero; integer division rounds."""
    divisor = equation.invars[1]
    not_zero = isinstance(divisor, Literal) and float(abs(divisor.val)) > 0
    floats = jnp.issubdtype(aval_of(equation.outvars[0]).dtype, jnp.inexact)
    return RuleResult([PARTIAL, REPLICATED], [PARTIAL]) if floats and not_zero and not partial[1] else None


def _choice(equation: JaxprEqn, partial: Sequence[bool], axis: Axis) -> RuleResult | None:
    """Answers for a choice among partial sums by a condition that all devices have."""
    return None if partial[0] else RuleResult([REPLICATED, *[PARTIAL] * (len(partial) - 1)], [PARTIAL])


_LINEAR: dict[str, Callable[[JaxprEqn, Sequence[bool], Axis], RuleResult | None]] = {
    **dict.fromkeys(("add", "add_any", "sub", "neg", "copy", "real", "imag", "conj", "name", "stop_gradient"), _sum),
    "convert_element_type": _cast,
    "mul": _product,
    "div": _quotient,
    "select_n": _choice,
}
"""Operation -> (equation, which operands are partial, axis) -> how it is carried out on partial sums."""


# --- products and convolutions ---


def dot_general(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
    """Answers for a product of two arrays; its result has the dimensions (batch, free of the left, free of the right).

    The left operand's dimensions are labelled (0, dim), the right one's (1, dim), or as those on the left that they are
    paired with.
    """
    contracting, batch = equation.params["dimension_numbers"]
    left, right = ([(i, dim) for dim in range(len(operand_shape(equation, i)))] for i in (0, 1))
    for pairs in (contracting, batch):
        for on_left, on_right in zip(*pairs, strict=True):
            right[on_right] = left[on_left]
    shared = [label for label in left if label in right]
    batched = [left[dim] for dim in batch[0]]
    return _of_larger(equation, left, right, batched + [x for x in left + right if x not in shared], shardings)


def conv_general_dilated(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
    """Answers for a convolution of images with a kernel.

    Examples and output features stay split; input features are summed over, which gives partial sums. Pixels are never
    split. The dimension numbers are (examples, features, ...) of the images and of the result, and (output features,
    input features, ...) of the kernel.
    """
    params, ndim = equation.params, len(operand_shape(equation))
    one_group, one_batch = params["feature_group_count"] == 1, params["batch_group_count"] == 1
    examples, taken = "examples" if one_batch else None, "taken" if one_group else None
    features = "features" if one_group and one_batch else None
    images, kernel, result = params["dimension_numbers"]
    labels = lambda dims, first, second: [{dims[0]: first, dims[1]: second}.get(dim) for dim in range(ndim)]
    left, right = labels(images, examples, taken), labels(kernel, features, taken)
    return _of_larger(equation, left, right, labels(result, examples, features), shardings)


def _of_larger(
    equation: JaxprEqn, left: Labels, right: Labels, result: Labels, shardings: Sequence[AxisSharding]
) -> RuleResult | None:
    """Keeps the larger of two operands as it lies, or the only one that can be kept."""
    largest_first = sorted((0, 1), key=lambda i: -math.prod(operand_shape(equation, i)))
    return by_labels([left, right], [result], shardings, largest_first)


# --- rules from the dimensions that an operation leaves alone ---

LabelsOf = Callable[..., Labels]
"""Equation, perhaps the name of a parameter -> for each dimension of the operand: its dimension in the result if it is
left alone, else None."""


def _keeping(labels_of: LabelsOf, *name: str, linear: bool = False, alike: int | None = 1) -> Rule:
    """Makes the rule of an operation that leaves some dimensions alone: it may be carried out on shards of these.

    Args:
      labels_of: says which dimensions, for all operands that have to lie alike.
      name: of the parameter that it reads, if it takes one.
      linear: whether the operation may be carried out on partial sums.
      alike: how many operands have to lie alike, from the first on (None: all); the others are replicated.
    """

    def rule(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
        operands, num_results = [labels_of(equation, *name)] * len(shardings[:alike]), len(equation.outvars)
        results = [range(len(result_shape(equation)))] * num_results
        split = by_labels(operands, results, shardings)
        return on_partial(shardings, num_results, alike) if split is None and linear else split

    return rule


def _named(equation: JaxprEqn, name: str) -> set[int]:
    """Reads the dimensions of the first operand that a parameter of an equation names."""
    ndim, named = len(operand_shape(equation)), equation.params[name]
    return {dim % ndim for dim in (named if isinstance(named, tuple | list) else (named,))}


def _other_than(equation: JaxprEqn, name: str) -> Labels:
    """Labels all dimensions but those that a parameter names."""
    named = _named(equation, name)
    return [None if dim in named else dim for dim in range(len(operand_shape(equation)))]


def _without(equation: JaxprEqn, name: str, *, summed: bool = False) -> Labels:
    """Labels the dimensions of an operation that removes those that a parameter names.

    If it sums over them (`summed`), they have labels of their own (~0, ~1, ...): a split one gives partial sums.
    """
    kept, removed, ndim = itertools.count(), _named(equation, name), len(operand_shape(equation))
    return [(~dim if summed else None) if dim in removed else next(kept) for dim in range(ndim)]


_WINDOW = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")


def _outside_window(equation: JaxprEqn) -> Labels:
    """Labels the dimensions along which a window has one element and moves by one."""
    params, ndim = equation.params, len(operand_shape(equation))
    sizes = zip(*[params.get(name) or (1,) * ndim for name in _WINDOW], map(tuple, params["padding"]), strict=True)
    return _where_equal(list(sizes), [(1,) * len(_WINDOW) + ((0, 0),)] * ndim)


def _if_as_wide(equation: JaxprEqn) -> Labels:
    """Labels all dimensions of a cast of bits, if the numbers have the same width."""
    old, new = aval_of(equation.invars[0]).dtype, aval_of(equation.outvars[0]).dtype
    ndim = len(operand_shape(equation))
    return range(ndim) if old.itemsize == new.itemsize else [None] * ndim


# --- rules of single operations ---


def broadcast_in_dim(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
    """The rule of `broadcast_in_dim`: dimensions keep their shards; one that grows has one element, and isn't split."""
    grows = math.prod(operand_shape(equation)) < math.prod(result_shape(equation))  # a sum is best taken before that
    rule = _keeping(lambda equation: equation.params["broadcast_dimensions"], linear=not grows)
    return rule(equation, shardings, axis)


def reshape(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
    """The rule of `reshape`: a shard stays if its blocks along the old dimension are blocks along a new one.

    `[2, 8]` split along the eight is, as `[16]`, `Shard(0, outer=2)`: two runs of elements for each device.
    """
    first, old = shardings[0], operand_shape(equation)
    if not isinstance(first, Shard):
        return on_partial(shardings, 1, 1)
    if equation.params.get("dimensions") is not None or 0 in old:
        return None
    before = math.prod(old[: first.dim]) * first.outer  # all elements are seen as [before, axis.size, rest]
    passed = 1  # the product of the new dimensions in front of `dim`
    for dim, size in enumerate(result_shape(equation)):
        if before % passed == 0 and size % (before // passed * axis.size) == 0:
            return RuleResult([first], [Shard(dim, before // passed)])
        passed *= size
    return None


_reduce = _keeping(_without, "axes")


def reduce_again(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
    """The rule of reductions that can be done in any order and more than once, such as a maximum.

    Over a split dimension each device reduces its part, and then reduces the results of all devices.
    """
    first = shardings[0]
    if not isinstance(first, Shard) or first.dim not in equation.params["axes"]:
        return _reduce(equation, shardings, axis)
    reduce = getattr(lax, equation.primitive.name)
    # A gather is used, since collectives that compare may lose NaN.
    twice = lambda operation, x: [reduce(_of_all_devices(operation(x)[0], axis), (0,))]
    return RuleResult([first], [REPLICATED], twice)


def _of_all_devices(x: jax.Array, axis: Axis) -> jax.Array:
    """Gathers the arrays of all devices along an axis, `[axis.size, ...]`."""
    return lax.all_gather(x, axis.names, axis_index_groups=axis.groups)


def find_again(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
    """The rule of `argmax` and `argmin`: along a split dimension each device finds the place in its run of elements.

    The result is the place of the first extreme of all. The device that has it gives its place, the others give zero:
    a partial sum.
    """
    first, (dim,) = shardings[0], equation.params["axes"]
    if first != Shard(dim):
        return _reduce(equation, shardings, axis)
    find, extreme = {"argmax": (lax.argmax, jnp.max), "argmin": (lax.argmin, jnp.min)}[equation.primitive.name]

    def on_device(operation: Operation, x: jax.Array) -> list[jax.Array]:
        (at,) = operation(x)
        at = at + axis.index().astype(at.dtype) * x.shape[dim]
        has_it = find(_of_all_devices(extreme(x, dim), axis), 0, at.dtype) == axis.index().astype(at.dtype)
        return [jnp.where(has_it, at, jnp.zeros_like(at))]

    return RuleResult([first], [PARTIAL], on_device)


def random_bits(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
    """The rule of `random_bits`: each device makes the bits of all examples, as without a mesh, and takes its own."""
    shape = result_shape(equation)
    if not axis.is_data or not shape or shape[0] % axis.size or shardings[0] != REPLICATED:
        return None

    def take_own(operation: Operation, key: jax.Array) -> list[jax.Array]:
        length = shape[0] // axis.size
        start = axis.index() * length
        return [lax.dynamic_slice_in_dim(operation(key)[0], start, length)]

    return RuleResult([REPLICATED], [Shard(0)], take_own)


def identity(equation: JaxprEqn, shardings: Sequence[AxisSharding], axis: Axis) -> RuleResult | None:
    """The rule of operations whose results are their operands."""
    return RuleResult(list(shardings), list(shardings))


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    "reduce_sum": _keeping(partial(_without, summed=True), "axes", linear=True),
    **dict.fromkeys(("reduce_max", "reduce_min", "reduce_and", "reduce_or"), reduce_again),
    **dict.fromkeys(("reduce_prod", "reduce_xor"), _reduce),
    **dict.fromkeys(("argmax", "argmin"), find_again),
    **dict.fromkeys(("cumsum", "split"), _keeping(_other_than, "axis", linear=True)),
    **dict.fromkeys(("cumprod", "cummax", "cummin", "cumlogsumexp", "top_k"), _keeping(_other_than, "axis")),
    "rev": _keeping(_other_than, "dimensions", linear=True),
    "squeeze": _keeping(_without, "dimensions", linear=True),
    "unstack": _keeping(_without, "axis", linear=True),
    "stack": _keeping(
        lambda e: [dim + (dim >= e.params["axis"]) for dim in range(len(operand_shape(e)))], linear=True, alike=None
    ),
    "transpose": _keeping(lambda e: np.argsort(e.params["permutation"]).tolist(), linear=True),
    **dict.fromkeys(
        ("slice", "dynamic_slice"), _keeping(lambda e: _where_equal(operand_shape(e), result_shape(e)), linear=True)
    ),
    "dynamic_update_slice": _keeping(
        lambda e: _where_equal(operand_shape(e, 0), operand_shape(e, 1)), linear=True, alike=2
    ),
    "concatenate": _keeping(_other_than, "dimension", linear=True, alike=None),
    "sort": _keeping(_other_than, "dimension", alike=None),
    "pad": _keeping(lambda e: [d if set(edges) == {0} else None for d, edges in enumerate(e.params["padding_config"])]),
    "tile": _keeping(lambda e: _where_equal(e.params["reps"], [1] * len(operand_shape(e)))),  # repeated once
    "reduce_window_sum": _keeping(_outside_window, linear=True),
    **dict.fromkeys(("reduce_window_max", "reduce_window_min"), _keeping(_outside_window)),
    **dict.fromkeys(("select_and_scatter_add", "select_and_gather_add"), _keeping(_outside_window, alike=None)),
    "bitcast_convert_type": _keeping(_if_as_wide),
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": reshape,
    "dot_general": dot_general,
    "conv_general_dilated": conv_general_dilated,
    "random_bits": random_bits,
    **dict.fromkeys(("optimization_barrier", "device_put"), identity),
    **LOOK_UPS,
}
"""The name of a primitive -> its rule."""


# --- parameters of an equation that name sizes ---


_RESULT_SHAPE = {"broadcast_in_dim": "shape", "reshape": "new_sizes", "dynamic_slice": "slice_sizes"}
"""Operation -> the parameter that is the result's shape."""


def part_params(equation: JaxprEqn, operands: Sequence[Shape], results: Sequence[Shape]) -> dict[str, object]:
    """Makes the parameters that an equation has on a device, for its parts of the operands.

    Args:
      equation: of whole arrays.
      operands: the shapes of the device's parts of the operands.
      results: the shapes of the device's parts of the results.
    """
    name, params = equation.primitive.name, equation.params
    changed: dict[str, object] = {}
    if name in _RESULT_SHAPE:
        changed[_RESULT_SHAPE[name]] = results[0]
    elif name == "slice":
        ends = zip(params["limit_indices"], result_shape(equation), results[0], strict=True)
        changed["limit_indices"] = tuple(end if old == new else new for end, old, new in ends)
    elif name == "gather":
        sizes = zip(params["slice_sizes"], operand_shape(equation), operands[0], strict=True)
        changed["slice_sizes"] = tuple(n if old == new or n == 1 else new for n, old, new in sizes)
    elif name == "scatter-add" and params["mode"] == lax.GatherScatterMode.PROMISE_IN_BOUNDS:
        changed["mode"] = lax.GatherScatterMode.FILL_OR_DROP  # where the entries of other devices lie
    # These parameters tell a compiler how to split results; a device has nothing to split.
    unsplit = dict.fromkeys({"sharding", "out_sharding"} & params.keys())
    return {**params, **unsplit, **changed}
