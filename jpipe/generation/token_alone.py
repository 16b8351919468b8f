"""Checks that a layer treats each token by itself: only then may it decode without a cache.

Attention without a cache would see one token in place of all, and positions counted within a call would all be the
first: wrong tokens, and no error. So a layer's jaxpr on whole sequences is partitioned as if each token lay on a device
of its own. A layer that treats each token by itself then sends nothing, and no device asks which token it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
from jax.sharding import PartitionSpec

from jpipe.cutting.whole import CutModel
from jpipe.jaxprs.flat_jaxpr import without_calls
from jpipe.jaxprs.rewriting import equations_in
from jpipe.jaxprs.tracing import no_mesh, trace
from jpipe.layers.connections import with_inputs
from jpipe.layers.decode_mode import CACHE
from jpipe.model.groups import Model
from jpipe.model.layer_function import LayerFunction
from jpipe.partitioner.choice import always
from jpipe.partitioner.conversions import sent_in
from jpipe.partitioner.per_device import jaxpr_per_device
from jpipe.partitioner.shardings import Axis, Sharding, of_spec, replicated
from jpipe.planning.plan import Plan
from jpipe.seam.jaxpr_types import ClosedJaxpr, JaxprEqn, Literal, Var, shapes_of
from jpipe.seam.primitives import ELEMENTWISE, MOVES
from jpipe.terminal.notices import warn_user
from jpipe.types import Leaf

AXIS_OF_TOKENS = "tokens"
_SPREADS = (ELEMENTWISE | MOVES) - {"iota", "concatenate", "pad"}
"""Operations that give the same number everywhere, if their operands do."""


def on_inputs(plan: Plan, cut: CutModel | None) -> Sequence[LayerFunction]:
    """Each group in evaluation, on the model's inputs instead of the batch, which may be longer than they are."""
    traced, remat = plan.traced, plan.request.remat
    if cut is not None:
        layers = cut.layers(cut.whole.trace(lambda inputs: inputs, traced.inputs))
        groups = [replace(group, layer=layers[group.indices[0]]) for group in traced.groups]
        return [LayerFunction(group, None, remat, traced.inputs) for group in groups]
    first, *others = traced.groups
    (layer,) = with_inputs(plan.request.layers[:1], lambda inputs: inputs)
    of_others = [LayerFunction(group, None, remat, traced.batch) for group in others]
    return [LayerFunction(replace(first, layer=layer), None, remat, traced.inputs), *of_others]


def warn_of_uncached(plan: Plan, decoding: Model, functions: Sequence[LayerFunction]) -> None:
    """Warns of layers that keep no cache in decode mode, and don't treat each token by itself in training.

    Args:
      plan: with the layers as they train, on sequences.
      decoding: the same layers in decode mode.
      functions: each group on whole sequences (`on_inputs`).
    """
    for function in functions:
        group = function.group
        if decoding.group_at(group.indices[0]).variables.get(CACHE):
            continue
        if sight := sees_more(function, jax.tree.leaves(plan.traced.inputs)[0].shape[1]):
            warn_user(
                f"generate: layer {group.indices[0]} ({group.layer.name}) {sight}, but keeps no cache in decode mode, "
                "where it is called with a token at a time: what follows may be wrong. Give it a field `decode` and "
                "what it has to know of the tokens before in the collection `cache` (Linen), or `init_cache` (nnx)"
            )


def sees_more(function: LayerFunction, length: int) -> str:
    """Says how a layer looks beyond a single token; "" if it treats each token by itself.

    A layer with a program of single devices (`jax.shard_map`) can't be tested, since its axes aren't there: "" too.

    Args:
      function: the layer in evaluation mode, on whole sequences.
      length: T, the tokens of a sequence: dimension 1 of what the layer takes, or the first that is so long.
    """
    if length == 1:
        return ""
    axes = (Axis((AXIS_OF_TOKENS,), (length,), is_data=True),)

    def at(leaf: Leaf) -> Sharding:
        """Split along its tokens: dimension 1, or another one where a whole model is cut within attention."""
        found = [i for i in range(1, leaf.ndim) if leaf.shape[i] == length]
        return of_spec(PartitionSpec(*[None] * found[0], AXIS_OF_TOKENS), axes) if found else replicated(axes)

    whole = replicated(axes)
    arguments, takes = function.arguments, jax.tree.leaves(function.group.takes)
    jaxpr, _ = trace(function.forward, arguments, takes)
    if _holds(jaxpr.jaxpr.eqns, "shard_map"):
        return ""
    sequences: list[Leaf] = [*jax.tree.leaves(arguments.batch), *takes]
    weights = len(jaxpr.jaxpr.invars) - len(sequences)
    shardings = [whole] * weights + [at(leaf) for leaf in sequences]
    wanted = [always(at(leaf)) for leaf in jaxpr.out_avals]
    with no_mesh():
        program = jaxpr_per_device(jaxpr, axes, shardings, wanted).jaxpr
    sent = sent_in(program.jaxpr, {AXIS_OF_TOKENS: length})
    if sent:
        return f"looks at other tokens ({sent[0].line or 'of no line'})"
    return "looks at the places of tokens" if _depends_on_place(program) else ""


def _depends_on_place(program: ClosedJaxpr) -> bool:
    """Whether a device's results depend on its place; a part of an array of one number doesn't."""
    jaxpr, placed = without_calls(program).jaxpr, set[Var]()
    even = {v for v in jaxpr.constvars if not shapes_of([v])[0].shape}
    is_even = lambda v: isinstance(v, Literal) or v in even
    for equation in jaxpr.eqns:
        name, operands = equation.primitive.name, equation.invars
        if (name in _SPREADS and all(map(is_even, operands))) or (name == "dynamic_slice" and is_even(operands[0])):
            even |= set(equation.outvars)
        elif _holds([equation], "axis_index") or not placed.isdisjoint(v for v in operands if isinstance(v, Var)):
            placed |= set(equation.outvars)
    return not placed.isdisjoint(v for v in jaxpr.outvars if isinstance(v, Var))


def _holds(equations: Sequence[JaxprEqn], name: str) -> bool:
    """Whether one of the equations, or one within them, is a primitive of this name."""
    return any(equation.primitive.name == name for equation in equations_in(equations))
