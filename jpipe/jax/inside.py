"""Uses what isn't public API of JAX and Flax, each with its reason and what its loss would cost.

Public are the modules that JAX's page on API compatibility lists, and what its reference documents of others:
`jax.core.Tracer` and `ShapedArray`, `jax.extend.core` (jaxprs, no promise between versions), `multihost_utils`,
`mesh_utils` and `io_callback` of `jax.experimental`. So they may be used anywhere. `tests/jax/test_inside.py` has a
test for each entry.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from linecache import getline
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import flax
import jax
import numpy as np
from flax import nnx
from jax.core import ShapedArray
from jax.experimental import layout
from jax.extend import source_info_util
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jpipe.jax.primitives import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, shapes_of
from jpipe.processes.progress import warn_once
from jpipe.types import Leaf, PyTree, Shapes

Part = TypeVar("Part", Jaxpr, JaxprEqn)

# --- jaxprs -----------------------------------------------------------------------------------------------------------


def needed_part(
    closed: ClosedJaxpr, wanted: Sequence[bool], keep: bool | Sequence[bool] = False
) -> tuple[ClosedJaxpr, list[bool]]:
    """(a jaxpr of only some outputs and what these need, which inputs it still takes); it looks into loops and calls.

    Uses `jax.interpreters.partial_eval.dce_jaxpr`. Without it: no telling whether a loop draws random numbers, or what
    follows from parameters alone. `jax.jit` removes dead code only as it compiles, and no public function gives the
    jaxpr. One's own would be 60 lines, most of them for loops.

    Args:
      closed: the jaxpr.
      wanted: for each output, whether it is wanted.
      keep: whether inputs that nothing needs stay; one answer for all, or one each.
    """
    jaxpr, used = dce_jaxpr(closed.jaxpr, wanted, instantiate=keep if isinstance(keep, bool) else list(keep))
    return ClosedJaxpr(jaxpr, closed.consts), used


def replaced(part: Part, **changes: Any) -> Part:
    """Replaces some fields of a jaxpr or an equation.

    Uses their methods `replace`, which no page describes. Without them no jaxpr can be changed, only interpreted anew,
    which loses the names of scopes. Constructors take the same fields, and change them more often.
    """
    return part.replace(**changes)


def called_by(equation: JaxprEqn) -> ClosedJaxpr:
    """The jaxpr of an equation that only calls one (`jpipe.jax.primitives.CALLS`), or of a `shard_map`.

    The parameter is `jaxpr` or `call_jaxpr`, closed or not. `jax.extend.core.jaxprs_in_params` finds it too, but
    without its constants.
    """
    params = equation.params
    called = params["jaxpr" if "jaxpr" in params else "call_jaxpr"]
    return called if isinstance(called, ClosedJaxpr) else ClosedJaxpr(called, ())


def axes_of(equation: JaxprEqn) -> tuple[str, ...]:
    """The axes that an operation over devices names, of a mesh or of `jax.vmap` (numbers); `axes` or `axis_name`."""
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    return axes if isinstance(axes, tuple) else (axes,)


def scan_counts(equation: JaxprEqn) -> tuple[int, int]:
    """(how many operands of a `scan` are constants, how many are its carry).

    Two numbers among the equation's parameters until JAX 0.11, then the tree `ft_in`. Without them no loop in a layer
    can be partitioned: it would run on whole arrays. No public function says which operand is which.
    """
    params = equation.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()  # trees with None for an operand
    return len(list(constants.vals)), len(list(carry.vals))


def scope_of(equation: JaxprEqn) -> AbstractContextManager[object]:
    """The context of the `jax.named_scope`s under which an equation was traced.

    From its `source_info`. Without it the names of a layer's parts are missing in profiles, within loops and calls.
    """
    scope = "/".join(scopes_of(equation))
    return jax.named_scope(scope) if scope else nullcontext()


def scopes_of(equation: JaxprEqn) -> tuple[str, ...]:
    """The names of the scopes of an equation within its jaxpr, outermost first; as `scope_of`."""
    return tuple(filter(None, str(equation.source_info.name_stack).split("/")))


def within(equation: JaxprEqn, callers: Sequence[JaxprEqn]) -> JaxprEqn:
    """Puts the names of callers' scopes before an equation's own; as `scope_of`."""
    stack = equation.source_info.name_stack
    for caller in reversed(callers):
        stack = caller.source_info.name_stack + stack
    return replaced(equation, source_info=equation.source_info.replace(name_stack=stack))


def standing_alone(equation: JaxprEqn, callers: Sequence[JaxprEqn]) -> JaxprEqn:
    """An equation with the names of its callers' scopes, and with the line of one if it has none; as `scope_of`."""
    with_line = next((e for e in (equation, *reversed(callers)) if line_of(e)), equation)
    alone = within(equation, callers)
    return replaced(alone, source_info=alone.source_info.replace(traceback=with_line.source_info.traceback))


def at_line_of(equation: JaxprEqn, callers: Sequence[JaxprEqn] = ()) -> AbstractContextManager[object]:
    """A context in which traced operations are attributed to the user's line of an equation, or else of its caller.

    Uses `jax.extend.source_info_util`, which has no page. Without it profiles and reports show collectives as
    jpipe's, without the user's line that caused them.
    """
    return source_info_util.user_context(standing_alone(equation, callers).source_info.traceback)


def line_of(equation: JaxprEqn, callers: Sequence[JaxprEqn] = ()) -> str:
    """The user's line that an equation, or else its caller, comes from, as "model.py:12"; empty if unknown.

    Uses `source_info.traceback`, as `at_line_of`.
    """
    lines = (_line_in(e.source_info.traceback) for e in (equation, *reversed(callers)))
    return next(filter(None, lines), "")


@lru_cache(maxsize=4096)  # each equation's is asked for several times
def _line_in(traceback: object) -> str:
    """The innermost of the user's lines in an equation's traceback, whose frames begin with the innermost."""
    users = (frame for frame in getattr(traceback, "frames", ()) if not frame.file_name.startswith(_LIBRARIES))
    return next((f"{Path(frame.file_name).name}:{frame.line_num}" for frame in users), "")


def raised(error: Exception) -> str:
    """Says an error in words, with the innermost of the user's lines in its traceback: number and code."""
    at = ""
    if frames := _users_frames(error):
        frame, number = frames[-1].tb_frame, frames[-1].tb_lineno
        file = frame.f_code.co_filename
        code = getline(file, number, frame.f_globals).strip()
        at = f" at {Path(file).name}:{number}" + f", `{code:.80}`" * bool(code)
    return f"{type(error).__name__}{at}: {str(error).rstrip('.')}"


def shortened(error: BaseException) -> BaseException:
    """Keeps only the user's frames in an error's traceback, unless `jax_traceback_filtering` is "off"."""
    if jax.config.jax_traceback_filtering != "off":  # pyright: ignore[reportAttributeAccessIssue]
        short = None
        for frame in reversed(_users_frames(error)):
            short = TracebackType(short, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        error.__traceback__ = short
        if before := error.__cause__ or error.__context__:
            shortened(before)
    return error


def _users_frames(error: BaseException) -> list[TracebackType]:
    """Lists the user's entries of an error's traceback, the innermost last."""
    frames, entry = [], error.__traceback__
    while entry:
        if not entry.tb_frame.f_code.co_filename.startswith(_LIBRARIES):
            frames.append(entry)
        entry = entry.tb_next
    return frames


_FOLDERS = [Path(jax.__file__).parent, Path(flax.__file__).parent, Path(__file__).parents[1]]
_LIBRARIES = tuple(str(folder) + os.sep for folder in _FOLDERS)
"""The files of a traceback that aren't the user's: the folders of JAX, of Flax and of this package."""


def carry_out(equation: JaxprEqn, operands: Sequence[Leaf], params: Mapping | None = None) -> list[jax.Array]:
    """Computes an equation for operands that may have other shapes than when it was traced, under another mesh.

    Makes a jaxpr of this equation alone, so that its scope, its compute type and the line of the user's that it came
    from stay; its context `ctx` is made anew for the mesh at hand. So is the function by which a scatter combines two
    numbers: else JAX lowers it with constraints of how these lie, and the GPU compiler fails where it folds constants.
    `Primitive.bind`, which is public, takes other parameters than an equation has for some primitives, and loses all of
    these. Without it nothing could be partitioned.

    Args:
      equation: whose variables may be of any shape.
      operands: one for each of its operands.
      params: instead of its parameters.
    """
    variables = new_variables([ShapedArray((), np.dtype(np.float32))] * len(operands))  # shapes don't matter
    params = dict(params or equation.params)
    if params.get("update_jaxpr") is not None:
        combine = _traced_here(ClosedJaxpr(params["update_jaxpr"], params["update_consts"]))
        params |= {"update_jaxpr": combine.jaxpr, "update_consts": tuple(combine.consts)}
    context = _context(equation.ctx, jax.sharding.get_abstract_mesh())
    single = replaced(equation, invars=variables, params=params, ctx=context)
    fields: dict[str, object] = {"invars": variables, "outvars": equation.outvars, "effects": equation.effects}
    return jaxpr_as_fun(ClosedJaxpr(replaced(_EMPTY, eqns=[single], **fields), ()))(*operands)


def in_place_of(equation: JaxprEqn, function: Callable[..., jax.Array]) -> list[JaxprEqn]:
    """Makes equations of a function that takes an equation's operands and gives its results, in its context."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        # JAX gives two traces of one function the same variables: side by side in a jaxpr they would be one value.
        made = jax.make_jaxpr(lambda *arguments: function(*arguments))(*shapes_of(equation.invars)).jaxpr
    names = dict(zip((*made.invars, *made.outvars), (*equation.invars, *equation.outvars), strict=True))
    named = lambda variables: [v if isinstance(v, Literal) else names.get(v, v) for v in variables]
    place = {"ctx": equation.ctx, "source_info": equation.source_info}
    return [replaced(e, invars=named(e.invars), outvars=named(e.outvars), **place) for e in made.eqns]


def meshes_of(equation: JaxprEqn) -> list[Mesh | AbstractMesh]:
    """The meshes that an equation was traced for: of its context, its sharding constraint, its `shard_map`.

    Reads its context, without which a model that was made under another mesh fails in the middle of `pipe.init`.
    """
    constraint = equation.params.get("sharding") if equation.primitive.name == "sharding_constraint" else None
    mapped = equation.params["mesh"] if equation.primitive.name == "shard_map" else None
    return [equation.ctx.cur_abstract_mesh, *filter(None, (getattr(constraint, "mesh", None), mapped))]


@cache
def _context(context: Any, mesh: AbstractMesh) -> Any:
    """Makes the context of an equation (compute type and the like), but with another mesh."""
    with context.manager, jax.sharding.use_abstract_mesh(mesh):
        return jax.make_jaxpr(lambda x: x + 1)(0.0).jaxpr.eqns[0].ctx


def _traced_here(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Traces a jaxpr again, under the mesh at hand."""
    jaxpr = closed.jaxpr

    def run(*arguments: Leaf) -> list[Leaf]:
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *arguments), strict=True))
        read = lambda v: np.asarray(v.val, shapes_of([v])[0].dtype) if isinstance(v, Literal) else values[v]
        for equation in jaxpr.eqns:
            values.update(zip(equation.outvars, carry_out(equation, list(map(read, equation.invars))), strict=True))
        return list(map(read, jaxpr.outvars))

    return jax.make_jaxpr(run)(*shapes_of(jaxpr.invars))


_EMPTY = jax.make_jaxpr(lambda: ())().jaxpr


def new_variables(shapes: Sequence[jax.ShapeDtypeStruct | ShapedArray]) -> list[Var]:
    """Makes variables of a jaxpr.

    Uses the constructor of `jax.extend.core.Var`, which no page describes. Tracing a function that gives its arguments
    makes them too, and takes ten times as long.
    """
    return [Var(ShapedArray(a.shape, a.dtype)) for a in shapes]


# --- meshes -----------------------------------------------------------------------------------------------------------


def with_named_axes(
    function: Callable[..., PyTree], sizes: Mapping[str, int]
) -> Callable[..., tuple[ClosedJaxpr, Shapes]]:
    """`jax.make_jaxpr` that also gives the shapes of the results, of a function that may name some axes.

    Uses the argument `axis_env`, which is documented, but for `jax.pmap`, which goes. Without it a layer with
    `nn.BatchNorm(axis_name="data")` can't be traced on whole micro-batches: `jax.vmap`, the other way to name an axis,
    would add a dimension to everything.
    """
    return jax.make_jaxpr(function, axis_env=list(sizes.items()), return_shape=True)


def with_axis_types(mesh: AbstractMesh, types: Mapping[str, AxisType]) -> AbstractMesh:
    """Makes a mesh whose axes are of other types, as far as they are named.

    Uses its method `update_axis_types`. `jax.sharding.AbstractMesh`, which is public, makes the same mesh, but for the
    kind of its devices, which kernels ask for as they are traced: that is what losing this would cost.
    """
    return mesh.update_axis_types(dict(types))


# --- orders of dimensions in memory -----------------------------------------------------------------------------------

_EXPORTED = (
    "jax.export can't keep how arrays lie in memory, so a compiler chooses that for this program: on TPUs pipe.apply "
    "takes as long as it did, but a training step may take half as long again; to train on TPUs, compile the step "
    "there, by jax.jit(pipe.train_step).lower(state, batch).compile()"
)


def held_to(array: jax.Array, order: Sequence[int]) -> jax.Array:
    """Holds an array's dimensions in this order in memory, the outermost first.

    Uses `jax.experimental.layout`, which has no page of reference; nothing public says how an array lies. Without it
    two loops may disagree, and whole buffers are copied in every tick (on TPUs; other compilers don't choose).

    A program that `jax.export` makes leaves it out: JAX refuses to export an operation of which it promises nothing. A
    primitive with a rule by `jax.interpreters.mlir` sees that. Without the rule no pipeline could be exported.
    """
    return _held_to.bind(array, order=tuple(order))


def _constrained(array: jax.Array, *, order: tuple[int, ...]) -> jax.Array:
    return layout.with_layout_constraint(array, layout.Layout(order))


def _lowered(context: mlir.LoweringRuleContext, array: mlir.ir.Value, *, order: tuple[int, ...]) -> Sequence:
    """Lowers the constraint to an operation of a program; to none if that is exported."""
    module = context.module_context
    if not module.lowering_parameters.for_export:
        return mlir.lower_fun(_constrained, multiple_results=False)(context, array, order=order)
    if "tpu" in module.platforms:
        warn_once(_EXPORTED)
    return [array]


def _batched(arrays: Sequence[jax.Array], dims: Sequence[int], *, order: tuple[int, ...]) -> tuple[jax.Array, int]:
    """Constrains a batch of arrays: the batch dimension is the outermost in memory."""
    (array,), (dim,) = arrays, dims
    return _held_to.bind(array, order=(dim, *(d + (d >= dim) for d in order))), dim


_held_to = Primitive("layout_constraint")  # of the name of JAX's own, by which `jpipe.jax.primitives` knows it
_held_to.def_abstract_eval(lambda array, *, order: array)
_held_to.def_impl(_constrained)
mlir.register_lowering(_held_to, _lowered)
batching.primitive_batchers[_held_to] = _batched


def orders_chosen(
    function: Callable[..., PyTree], arguments: Sequence[Leaf], shardings: Sequence[list[NamedSharding]]
) -> list[tuple[int, ...]]:
    """Asks which orders of dimensions the compiler chooses for the first of two lists of results; as `held_to`.

    Args:
      function: -> (results whose orders are chosen, other results).
      arguments: what it takes, or shapes.
      shardings: of both lists of results.
    """
    chosen, others = shardings
    formats = [layout.Format(layout.Layout.AUTO, sharding) for sharding in chosen]
    compiled = jax.jit(function, out_shardings=(formats, others)).lower(*arguments).compile()
    return [tuple(map(int, form.layout.major_to_minor)) for form in compiled.output_formats[0]]


# --- Flax -------------------------------------------------------------------------------------------------------------


def collection_of(variable_type: type[nnx.Variable]) -> str:
    """The name of the collection that variables of a type are in, as in Linen: `batch_stats` of `nnx.BatchStat`.

    Uses `nnx.variable_name_from_type`, which `nnx.bridge` uses; types that it doesn't know are called as their class.
    The reference has no page for it. Without it collections have other names, in checkpoints and in `merge` too.
    """
    try:
        return nnx.variable_name_from_type(variable_type)
    except ValueError:
        return variable_type.__name__


def unsharded_creation() -> AbstractContextManager[object]:
    """A context in which nnx doesn't put new variables onto a mesh: where they lie is the layout's to say.

    Uses `nnx.use_eager_sharding`, which only a proposal describes. Without it modules with sharding metadata can't be
    made where a mesh is set. The public flag `flax_always_shard_variable` is one for the whole program.
    """
    return nnx.use_eager_sharding(False)
