"""Names the types of jaxprs, and the primitives of JAX by what they do.

JAX documents functions, not the primitives that they become, and each version renames some. So whoever treats some
operations differently asks for one of the sets below, and has to be safe for a name in none of them.
`tests/jax/test_primitives.py` says which names a new version brought, and feeds an unknown primitive to each user.

From JAX 0.12 on `ClosedJaxpr` is another name of `Jaxpr`, where it was a class around it. Both have `.jaxpr` and
`.consts`, so code that unpacks a `ClosedJaxpr` runs on either. Type checkers take the newer name for private to JAX,
and no longer know the shape of what a jaxpr takes and gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from jax.extend import core
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import JaxprEqn as JaxprEqn
from jax.extend.core import Literal as Literal
from jax.extend.core import Var as Var

ClosedJaxpr: TypeAlias = core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
"""A jaxpr with the constants that it reads."""


def shapes_of(variables: Sequence[Var | Literal]) -> list[jax.ShapeDtypeStruct]:
    """Lists the shapes and dtypes of variables of a jaxpr, all of them arrays."""
    avals: list[Any] = [v.aval for v in variables]
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]


# --- names of primitives ----------------------------------------------------------------------------------------------


def _read(text: str) -> dict[str, str]:
    """Reads the NumPy function that does the same as each primitive, "" if none does.

    >>> _read("abs erf= sub=subtract")
    {'abs': 'abs', 'erf': '', 'sub': 'subtract'}
    """
    entries = (entry.partition("=") for entry in text.split())
    return {name: numpy if equals else name for name, equals, numpy in entries}


_ARITHMETIC = _read("""
abs acos=arccos acosh=arccosh add add_any=add and=bitwise_and asin=arcsin asinh=arcsinh atan=arctan atan2=
atanh=arctanh cbrt ceil clamp= convert_element_type= copy= copy_p= cos cosh div= erf= erf_inv= erfc= exp exp2 expm1
floor integer_pow= log log1p log2 logistic= max=maximum min=minimum mul=multiply neg=negative not=invert
one_minus_square= or=bitwise_or polynomial= pow=power reduce_precision= rem=fmod round= rsqrt= select_n= sign sin sinh
sqrt square stop_gradient= sub=subtract tan tanh xor=bitwise_xor
""")
# Comparisons, special functions, operations on bits and complex numbers; `name` is `jax.ad_checkpoint.checkpoint_name`,
# by which policies choose what to save.
_BESIDES = _read("""
eq=equal eq_to= ge=greater_equal gt=greater is_finite=isfinite le=less_equal le_to= lt=less lt_to= ne=not_equal
bessel_i0e= bessel_i1e= digamma= igamma= igamma_grad_a= igammac= lgamma= polygamma= regularized_incomplete_beta= zeta=
clz= mulhi= nextafter population_count= shift_left= shift_right_arithmetic= shift_right_logical=
complex= conj imag real name=
""")

_names = lambda text: frozenset(_read(text))

ELEMENTWISE = frozenset(_ARITHMETIC | _BESIDES)
"""Each element of the result follows from those at its place in the operands, or from a scalar."""

NUMPY = {name: numpy for name, numpy in (_ARITHMETIC | _BESIDES).items() if numpy}
"""Elementwise primitives -> the NumPy functions that do the same."""

MOVES = _names("broadcast_in_dim concatenate iota pad rev reshape slice squeeze split stack tile transpose unstack")
"""They put elements elsewhere, wherever these come from, and compute nothing."""

CHEAP = frozenset(_ARITHMETIC) | MOVES
"""Their results take less time to make again than to write down and read back; a comparison gives single bytes."""

CALLS = _names("closed_call custom_jvp_call custom_vjp_call eval_jaxpr jit remat2")
"""They only call the jaxpr in their parameters."""

PLAIN_CALLS = CALLS - {"custom_jvp_call", "custom_vjp_call", "remat2"}
"""Those of them that have no say in how the jaxpr is differentiated."""

LOOPS_AND_BRANCHES = _names("cond scan while")
"""Their jaxprs run never, once or often; `jpipe.jax.inside.scan_counts` says which operands are what."""

REDUCTIONS = _names("reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum")
"""Reductions over the dimensions `axes`."""

SUMS_OVER_DEVICES = _names("pbroadcast pmax pmin psum psum_invariant pvary")
"""Operations over mesh axes that give a single device its own value."""

OVER_DEVICES = _names("all_gather all_gather_invariant all_to_all axis_index ppermute ragged_all_to_all reduce_scatter")
"""Operations over mesh axes whose result tells a device's place and their number, or has the shape of several."""

COLLECTIVES = _read("""
all_gather all_gather_invariant=all_gather all_to_all pmax=all_reduce pmin=all_reduce ppermute=permute
psum=all_reduce psum_invariant=all_reduce ragged_all_to_all=all_to_all reduce_scatter
""")
"""Operations over mesh axes in which devices send -> the name of that transfer."""

_WITHOUT_FLOATS = _read("""
bitcast_convert_type copy copy_p create_token debug_callback debug_print device_put dynamic_slice dynamic_update_slice
empty empty2 empty_ref freeze gather get io_callback layout_constraint masked_load masked_swap mesh_cast name new_ref
num_programs optimization_barrier pbroadcast platform_index program_id pure_callback pvary random_clone random_unwrap
random_wrap reshard scatter sharding_constraint stop_gradient swap all_gather_reduced preduced
lu_pivots_to_permutation
""")

FREE = MOVES | OVER_DEVICES | frozenset(_WITHOUT_FLOATS)
"""They take no floating-point operation."""

_MORE_BY_ELEMENT = ("addupdate", "approx_top_k", "arg", "cum", "reduce", "scatter", "select_and_", "sort", "top_k")


def draws(name: str) -> bool:
    """Whether a primitive makes random numbers or their keys.

    >>> draws("random_bits"), draws("add")
    (True, False)
    """
    return name.startswith(("random_", "threefry", "rng_"))


def is_by_element(name: str) -> bool:
    """Whether a primitive takes about one operation an element of what it gives, or of what it reduces.

    >>> is_by_element("tanh"), is_by_element("reduce_sum"), is_by_element("eigh")
    (True, True, False)
    """
    return name in ELEMENTWISE or name in SUMS_OVER_DEVICES or draws(name) or name.startswith(_MORE_BY_ELEMENT)
