"""Loops, branches, calls on parts of arrays (`test_rules.py` compares more); constraints, `shard_map`; what is sent."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from collectives import read
from jpipe.jax.flat_jaxpr import flatten
from jpipe.partitioner.choice import Chooser
from jpipe.partitioner.conversions import sent_in
from jpipe.partitioner.per_device import HANDLERS, jaxpr_per_device
from jpipe.partitioner.shardings import REPLICATED, Axis, Shard
from jpipe.partitioner.way import way_by_rule
from partitioned import array, on_mesh

P = PartitionSpec


def test_branches_by_platform(make_mesh):
    """A regression: the branches of other platforms were lowered too."""
    mesh = make_mesh((2,), ("model",))

    def function(x):
        return jax.lax.platform_dependent(x, tpu=lambda x: x * 0, cpu=jnp.sin, default=jnp.cos)

    x = np.arange(4, dtype=np.float32)
    found = on_mesh(function, mesh, PartitionSpec("model"), PartitionSpec("model"))(x)
    np.testing.assert_allclose(found, np.sin(x), rtol=1e-6)


def test_nested_loops_are_planned_in_time():
    """A regression: each level asked three times for what is in it; six levels took a minute."""
    function = jnp.tanh
    for _ in range(6):
        function = lambda x, inner=function: jax.lax.scan(lambda c, _: (inner(c), None), x, length=2)[0]
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: function(x).sum()))(np.ones((4, 4), np.float32))
    asked = []

    def counted(equation, *arguments, **options):
        asked.append(equation)
        return way_by_rule(equation, *arguments, **options)

    Chooser((Axis(("model",), (2,)),), HANDLERS, counted).make_plan(flatten(jaxpr), [(Shard(0),)], [lambda s: s])
    assert 0 < len(asked) < 1000


def test_devices_agree_where_branches_send():
    """A regression: not where operands were replicated, though random bits are split over data axes."""

    def function(x, key):
        return jax.lax.cond(x.sum() > 0, lambda: jnp.sort(jax.random.normal(key, (8,))), lambda: jnp.zeros(8))

    axes = (Axis(("data",), (2,), is_data=True),)
    jaxpr = jax.make_jaxpr(function)(np.ones(4, np.float32), jax.random.key(0))
    with jax.sharding.use_abstract_mesh(AbstractMesh((2,), ("data",), axis_types=(AxisType.Manual,))):
        program = jaxpr_per_device(jaxpr, axes, [(REPLICATED,)] * 2, [lambda _: (REPLICATED,)])
    assert "pmax" in str(program.jaxpr) and "all_gather" in str(program.jaxpr)


def test_a_constraint_is_followed_along_axes_that_split_no_examples(make_mesh):
    mesh, x = make_mesh((2, 2), ("data", "model")), array(4, 8).astype(np.float32)
    function = lambda x: lax.with_sharding_constraint(x, P(None, "model")) * 2

    run = on_mesh(function, mesh, P("data"), P("data", "model"), data_axes=["data"])
    text = run.lower(x).as_text()
    np.testing.assert_array_equal(run(x), x * 2)
    assert "tensor<2x4xf32>" in text and "all_gather" not in text
    # Without data axes it means what it says: whole along `data`.
    assert "all_gather" in on_mesh(function, mesh, P("data"), P("data", "model")).lower(x).as_text()


def test_a_function_of_single_devices_sees_its_parts_and_the_rest_is_carried_out(make_mesh):
    """Manual over `expert`; along `model` its product is carried out as any other, and a permutation stays within."""
    mesh, x, w = make_mesh((2, 2), ("expert", "model")), array(4, 8), array(8, 6)

    def inner(x, w):
        y = lax.ppermute(x @ w, "expert", [(0, 1), (1, 0)])
        return y + lax.axis_index("expert"), lax.psum(jnp.sum(x), "expert")

    def function(x, w):
        specs = {"in_specs": (P("expert"), P()), "out_specs": (P("expert"), P())}
        return jax.shard_map(inner, axis_names={"expert"}, check_vma=False, **specs)(x, w)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        run = on_mesh(function, mesh, (P(None, "model"), P("model")), (P("expert", "model"), P()))
        y, total = run(x, w)
        text = run.lower(x, w).as_text()
    expected = np.roll(x @ w, 2, 0) + np.repeat([0, 1], 2)[:, None]
    np.testing.assert_allclose(y, expected, rtol=1e-12)
    np.testing.assert_allclose(total, x.sum(), rtol=1e-12)
    assert "collective_permute" not in text


ROUND = [(i, (i + 1) % 8) for i in range(8)]
PERMUTATIONS = {
    "round": (ROUND, 2),
    "round by three": ([(i, (i + 3) % 8) for i in range(8)], 2),
    "across": ([(i, (i + 4) % 8) for i in range(8)], 1),
    "a chain": (ROUND[2:6], 2),
    "rings of odd length": ([(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 6), (6, 7), (7, 3)], 3),
    "all stay": ([(i, i) for i in range(8)], 0),
}


@pytest.mark.parametrize("name", PERMUTATIONS)
def test_a_permutation_within_is_a_few_gathers_in_pairs(make_mesh, name):
    permutation, times = PERMUTATIONS[name]
    mesh, x, expected = make_mesh((8,), ("context",)), array(8, 3) + 9, np.zeros((8, 3))
    specs = {"in_specs": P("context"), "out_specs": P("context")}
    moved = jax.shard_map(lambda x: lax.ppermute(x, "context", permutation), axis_names={"context"}, **specs)
    run = on_mesh(moved, mesh, P("context"), P("context"))
    for source, target in permutation:
        expected[target] = x[source]
    with jax.enable_x64(True):
        np.testing.assert_array_equal(run(x), expected)
        sent = sent_in(jax.make_jaxpr(run)(x).jaxpr, dict(mesh.shape))
    assert [one.collective for one in sent] == ["all_gather"] * len(sent)
    assert sum(one.bytes for one in sent) == times * x[0].nbytes


def chosen(function, lying, *shapes, names=("expert", "model")):
    """The way of the only equation that a function has, besides how its results lie."""
    jaxpr = jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes])
    axes = tuple(Axis((name,), (2,)) for name in names)
    return Chooser(axes, HANDLERS).make_plan(flatten(jaxpr), lying, [lambda s: s])


def test_a_constraint_of_one_dimension_over_two_axes(make_mesh):
    """A regression: the second axis was left out, and what lay along one that comes later stood in the way."""
    mesh = make_mesh((2, 2), ("expert", "model"))
    constrain = lambda spec: lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    both = chosen(constrain(P(("expert", "model"))), [(REPLICATED, REPLICATED)], (8, 4))
    assert both.results == ((Shard(0), Shard(0, 2)),)
    one = chosen(constrain(P("expert")), [(REPLICATED, Shard(0))], (8, 4))
    assert one.results == ((Shard(0), REPLICATED),)
    as_far_as_possible = chosen(constrain(P("expert", "model")), [(REPLICATED, REPLICATED)], (8, 3))
    assert as_far_as_possible.results == ((Shard(0), REPLICATED),)


def test_a_maximum_over_devices_is_not_taken_of_partial_sums(make_mesh):
    """A regression: it was, where it is also over an axis along which all devices have the same."""
    mesh = make_mesh((2, 2, 2), ("stage", "expert", "model"))

    def function(x, w):
        inside = lambda x, w: lax.pmax(x @ w, ("stage", "expert"))
        specs = {"in_specs": (P("expert"), P()), "out_specs": P()}
        return jax.shard_map(inside, mesh=mesh, axis_names={"stage", "expert"}, check_vma=False, **specs)(x, w)

    plan = chosen(function, [(REPLICATED, Shard(1)), (REPLICATED, Shard(0))], (8, 4), (4, 6))
    ((inner, _),) = plan.equations[-1].way.plans
    assert inner.equations[-1].flat.equation.primitive.name == "pmax"
    assert inner.equations[-1].way.operands == ((REPLICATED,),)


@pytest.mark.parametrize("reduce", [lax.psum, lax.pmax])
def test_a_sum_over_what_jax_vmap_runs_over_needs_all_of_it(make_mesh, reduce):
    """A regression: a sum was taken of the rows that a device had."""
    mesh = make_mesh((2, 2), ("expert", "model"))

    def function(x):
        inside = jax.vmap(lambda row: reduce(row, "rows"), axis_name="rows", out_axes=None)
        specs = {"in_specs": P(None, "expert"), "out_specs": P("expert")}
        return jax.shard_map(inside, mesh=mesh, axis_names={"expert"}, check_vma=False, **specs)(x)

    plan = chosen(function, [(REPLICATED, Shard(0))], (8, 4))
    ((inner, _),) = plan.equations[-1].way.plans
    way = next(e.way for e in inner.equations if e.flat.equation.primitive.name == reduce.__name__)
    assert way.operands == way.results == ((REPLICATED,),)


def test_a_gather_over_devices_that_are_alike_is_refused(make_mesh):
    mesh = make_mesh((2, 2, 2), ("stage", "expert", "model"))

    def function(x):
        inside = lambda x: lax.all_gather(x, "stage")
        return jax.shard_map(inside, mesh=mesh, in_specs=P("expert"), out_specs=P(None, "expert"), check_vma=False)(x)

    with pytest.raises(ValueError, match=r"jax.shard_map holds all_gather over the axes \('stage',\), .*axis_names="):
        chosen(function, [(REPLICATED, REPLICATED)], (8, 4))


# --- the function alone -----------------------------------------------------------------------------------------------

SHAPES = {"q": (16, 4, 4), "k": (16, 4, 4), "v": (16, 4, 4), "o": (4, 4, 16), "gate": (16, 32), "up": (16, 32)}
SHAPES |= {"down": (32, 16), "a": (16,), "b": (16,)}
SPECS = {name: P(None, "model") for name in ("q", "k", "v", "gate", "up")} | {"o": P("model"), "down": P("model")}
SPECS |= {"a": P(), "b": P()}


def rms(x, weight):
    wide = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    return weight * (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def block(p, x):
    """A Llama block: attention and SwiGLU, each after a norm and beside a residual connection; `[b, t, d]`."""
    h = rms(x, p["a"])
    q, k, v = [jnp.einsum("btd,dhe->bthe", h, p[name]) for name in "qkv"]
    attended = jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(jnp.einsum("bthe,bshe->bhts", q, k)), v)
    x = x + jnp.einsum("bthe,hed->btd", attended, p["o"])
    h = rms(x, p["b"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def back(p, x, cotangent):
    """The gradients of a block, whose forward is computed on the way."""
    return jax.vjp(block, p, x)[1](cotangent)


@pytest.mark.parametrize(
    ("function", "in_specs", "out_specs", "num_sums"),
    [(block, (SPECS, P()), P(), 2), (back, (SPECS, P(), P()), (SPECS, P()), 3)],
)
def test_a_block_sends_no_more_than_by_the_compiler_and_as_narrow(make_mesh, function, in_specs, out_specs, num_sums):
    """A regression: sums over a tensor axis were taken twice, in float32 for the norm and again beside it."""
    mesh, narrow = make_mesh((4,), ("model",)), lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    arguments = [{name: narrow(*shape) for name, shape in SHAPES.items()}, *[narrow(2, 8, 16)] * (len(in_specs) - 1)]
    text = on_mesh(function, mesh, in_specs, out_specs).lower(*arguments).as_text()
    kinds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 4}  # sent, in 3 / 4 of the elements that are given
    found = re.findall(rf'"stablehlo\.({"|".join(kinds)})"[\s\S]*?-> tensor<(\S+)x(\w+)>', text)
    assert {dtype for *_, dtype in found} == {"bf16"}
    sizes = [(kind, list(map(int, shape.split("x")))) for kind, shape, _ in found]
    large = [(kind, math.prod(shape)) for kind, shape in sizes if len(shape) > 1]  # but gradients of norms' weights
    assert sum(kinds[kind] * count for kind, count in large) == num_sums * 2 * (2 * 8 * 16)
    specs = jax.tree.map(lambda s: NamedSharding(mesh, s), (in_specs, out_specs))
    compilers = jax.jit(function, in_shardings=specs[0], out_shardings=specs[1]).lower(*arguments)
    assert [c.kind for c in read(compilers.compile().as_text())] == ["all-reduce"] * num_sums
