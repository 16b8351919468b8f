"""Each entry of the seam to JAX does what it says in this version of JAX; a failure names what has changed."""

import re
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from absent_cudnn import absent_cudnn
from cases import assert_equal
from jpipe.jax import inside
from jpipe.jax.inside import collection_of, unsharded_creation

CHANGED = f"JAX {jax.__version__} has changed this: see the docstring of"
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def only(closed):
    (equation,) = closed.jaxpr.eqns
    return equation


def test_needed_part():
    """Of a loop too: which parts of its carry a result needs."""

    def function(x, y, z):
        (a, _), _ = jax.lax.scan(lambda c, _: ((c[0] * 2, c[1] + z), None), (x, y), length=3)
        return a, jnp.sin(y)

    closed = jax.make_jaxpr(function)(1.0, 2.0, 3.0)
    part, used = inside.needed_part(closed, [True, False])
    assert used == [True, False, False], f"{CHANGED} needed_part"
    assert_equal(jaxpr_as_fun(part)(1.0), [np.float32(8)])
    part, _ = inside.needed_part(closed, [False, True], keep=True)
    assert_equal(jaxpr_as_fun(part)(1.0, 2.0, 3.0), [jnp.sin(2.0)])
    part, used = inside.needed_part(closed, [False, True], keep=[True, False, False])
    assert len(part.jaxpr.invars) == 2 and used == [True, True, False], f"{CHANGED} needed_part"


@jax.custom_jvp
def own(x):
    return x * 2


own.defjvp(lambda primals, tangents: (own(*primals), tangents[0]))


@pytest.mark.parametrize("call", [jax.jit(jnp.sin), jax.checkpoint(jnp.sin), own], ids=["jit", "checkpoint", "jvp"])
def test_called_by(call):
    called = inside.called_by(only(jax.make_jaxpr(call)(1.0)))
    assert_equal(jaxpr_as_fun(called)(jnp.float32(0.5)), [call(jnp.float32(0.5))])


def wrong(x):
    return jnp.dot(x, jnp.ones(5))


def test_an_error_in_words():
    with pytest.raises(TypeError) as caught:
        jax.make_jaxpr(wrong)(jnp.ones(4))
    line = r"TypeError at test_inside\.py:\d+, `return jnp\.dot\(x, jnp\.ones\(5\)\)`: .*"
    assert re.fullmatch(line, inside.raised(caught.value))
    assert inside.raised(ValueError("of no line.")) == "ValueError: of no line"


def test_meshes_of():
    mesh = jax.make_mesh((1, 1), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    split = NamedSharding(mesh, PartitionSpec("a"))

    def function(x):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            x = jnp.sin(x)
        x = jax.lax.with_sharding_constraint(x, split)
        return jnp.cos(jax.shard_map(jnp.exp, mesh=mesh, in_specs=split.spec, out_specs=split.spec)(x))

    equations = jax.make_jaxpr(function)(X).eqns
    found = {equation.primitive.name: [at.size for at in inside.meshes_of(equation)] for equation in equations}
    assert found == {"sin": [1], "sharding_constraint": [0, 1], "shard_map": [0, 1], "cos": [0]}, f"{CHANGED} meshes_of"


def test_carry_out_in_another_mesh():
    """An equation traced under Auto axes runs where they are manual, and keeps its scope."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        equation = only(jax.make_jaxpr(jax.named_scope("mine")(jnp.sin))(X))
    run = jax.shard_map(
        lambda x: inside.carry_out(equation, [x])[0],
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
    )
    assert_equal(jax.jit(run)(X), jax.jit(jnp.sin)(X))
    assert "mine/sin" in jax.jit(run).lower(X).as_text(debug_info=True), f"{CHANGED} carry_out"


@pytest.mark.parametrize("change", ["add", "max", "apply"])
def test_carry_out_of_a_scatter_in_another_mesh(change):
    """What a scatter does with two numbers forgets the mesh of its trace.

    It was lowered with sharding constraints inside, which the GPU compiler couldn't compute as it folded constants.
    """
    mesh = jax.make_mesh((2, 1), ("stage", "data"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:2])
    value = (lambda x: x + jnp.pi) if change == "apply" else 1.5
    function = lambda x: getattr(jnp.asarray(x).at[jnp.array([0, 1])], change)(value)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh.update_axis_types({"stage": AxisType.Manual})):
        equation = jax.make_jaxpr(function)(X).jaxpr.eqns[-1]
    assert equation.primitive.name.startswith("scatter")
    indices, updates = jnp.array([[0], [1]]), jnp.full((2, X.shape[1]), 1.5, X.dtype)
    run = lambda x: inside.carry_out(equation, [x, indices, updates])[0]
    on_devices = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    )
    assert_equal(on_devices(X), function(X))
    assert "sharding_constraint" not in on_devices.lower(X).as_text()


def test_held_to():
    """The program says so; values stay."""
    held = jax.jit(lambda x: inside.held_to(x * 2, (1, 0)))
    assert_equal(held(X), X * 2)
    assert "dense<[0, 1]>" in held.lower(X).as_text(), f"{CHANGED} held_to"
    exported = export.export(held)(X)
    assert "LayoutConstraint" not in exported.mlir_module(), f"{CHANGED} held_to"
    assert_equal(exported.call(X), X * 2)


@pytest.mark.parametrize(("dim", "innermost_first"), [(0, "1, 2, 0"), (1, "0, 2, 1"), (2, "0, 1, 2")])
def test_held_to_of_many_arrays(dim, innermost_first):
    """They lie one after the other, each in its order."""
    many = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    held = jax.jit(jax.vmap(lambda x: inside.held_to(x, (1, 0)), in_axes=dim, out_axes=dim))
    assert_equal(held(many), many)
    assert f"dense<[{innermost_first}]>" in held.lower(many).as_text()


def test_lines():
    """The user's, also of what is traced in the place of an equation."""

    def users(x):
        return jnp.sin(x)  # this line

    equation = only(jax.make_jaxpr(users)(1.0))
    here = [i + 1 for i, line in enumerate(Path(__file__).read_text().splitlines()) if line.endswith("# this line")]
    assert inside.line_of(equation) == f"test_inside.py:{here[0]}", f"{CHANGED} line_of"

    def ours(x):
        with inside.at_line_of(equation):
            return jnp.cos(x)

    assert inside.line_of(only(jax.make_jaxpr(ours)(1.0))) == inside.line_of(equation), f"{CHANGED} at_line_of"
    assert inside.scopes_of(equation) == ()


# --- flax inside ------------------------------------------------------------------------------------------------------


class Seen(nnx.Variable):
    """A variable type of a user's."""


@pytest.mark.parametrize(
    ("kind", "name"), [(nnx.Param, "params"), (nnx.BatchStat, "batch_stats"), (nnx.Cache, "cache"), (Seen, "Seen")]
)
def test_collections_are_called_as_in_linen(kind, name):
    found = collection_of(kind)
    assert found == name, f"Flax {flax.__version__} calls {kind.__name__} {found!r}: checkpoints hold it as {name!r}"


def test_variables_are_made_off_the_mesh():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    make = nnx.with_partitioning(nnx.initializers.ones_init(), ("elsewhere",))  # an axis that the mesh hasn't
    with jax.set_mesh(mesh), unsharded_creation():
        made = nnx.Param(make(jax.random.key(0), (4,)))
    np.testing.assert_array_equal(made.get_value(), np.ones(4))


# --- absent cudnn -----------------------------------------------------------------------------------------------------


HEADS = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)


def traced():
    """The shapes that attention by cuDNN gives, or JAX's words against it; traced anew."""

    def attention(x):
        return jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation="cudnn")

    try:
        return jax.eval_shape(attention, HEADS)
    except RuntimeError as error:
        return str(error)


def test_attention_by_cudnn_is_traced_where_there_is_none():
    with absent_cudnn():
        assert traced() == HEADS
