"""What users say of devices themselves: sharding constraints, and `shard_map` within."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.jaxprs.flat_jaxpr import flatten
from jpipe.partitioner import per_device
from jpipe.partitioner.choice import Chooser
from jpipe.partitioner.control_flow import CONTROL_FLOW
from jpipe.partitioner.shardings import REPLICATED, Axis, Shard
from jpipe.partitioner.traffic import sent_in
from jpipe.partitioner.user_shardings import USER_SHARDINGS, _is_manual, named_axes
from partitioned import array

P = PartitionSpec


def on_mesh(function, mesh, in_specs, out_specs, **options):
    on_parts = per_device(function, mesh, in_specs, out_specs, **options)
    return jax.jit(jax.shard_map(on_parts, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


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
    "round, the other way": ([(b, a) for a, b in ROUND], 2),
    "round by three": ([(i, (i + 3) % 8) for i in range(8)], 2),
    "across": ([(i, (i + 4) % 8) for i in range(8)], 1),
    "a chain": (ROUND[2:6], 2),
    "rings of odd length": ([(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 6), (6, 7), (7, 3)], 3),
    "some stay": ([(1, 1), (0, 2), (5, 5)], 1),
    "all stay": ([(i, i) for i in range(8)], 0),
    "none": ([], 0),
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


def test_of_three_devices_a_permutation_is_one_gather(make_mesh):
    mesh, x, specs = make_mesh((3,), ("context",)), array(3, 2), {"in_specs": P("context"), "out_specs": P("context")}
    turned = jax.shard_map(lambda x: lax.ppermute(x, "context", [(0, 1), (1, 2), (2, 0)]), **specs)
    np.testing.assert_array_equal(on_mesh(turned, mesh, P("context"), P("context"))(x), np.roll(x, 1, 0).astype("f4"))


def test_a_part_of_joint_axes_is_refused():
    axis = Axis(("data", "fsdp"), (2, 2), is_data=True)
    assert _is_manual(axis, {"data", "fsdp", "model"}) and not _is_manual(axis, {"model"})
    with pytest.raises(ValueError, match=r"manual over \['data'\], a part of the mesh axes"):
        _is_manual(axis, {"data"})


def test_axes_that_are_named(make_mesh):
    """In loops and calls too; of a `shard_map` those of its specs, whatever it is manual over."""
    mesh = make_mesh((2, 2, 2), ("a", "b", "c"))

    @jax.jit
    def constrained(x):
        return lax.with_sharding_constraint(x, P(P.UNCONSTRAINED, ("a",)))

    loop = lambda x: lax.fori_loop(0, 2, lambda _, x: constrained(x), x)
    each = jax.shard_map(jnp.sin, in_specs=P("c"), out_specs=P("c"), check_vma=False)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        found = [named_axes(jax.make_jaxpr(run)(jnp.ones((4, 4)))) for run in (jnp.sin, loop, each)]
    assert found == [set(), {"a"}, {"c"}]


def chosen(function, lying, *shapes, names=("expert", "model")):
    """The way of the only equation that a function has, besides how its results lie."""
    jaxpr = jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes])
    axes = tuple(Axis((name,), (2,)) for name in names)
    return Chooser(axes, CONTROL_FLOW | USER_SHARDINGS).make_plan(flatten(jaxpr), lying, [lambda s: s])


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


def test_a_gather_over_devices_that_are_alike_is_refused(make_mesh):
    mesh = make_mesh((2, 2, 2), ("stage", "expert", "model"))

    def function(x):
        inside = lambda x: lax.all_gather(x, "stage")
        return jax.shard_map(inside, mesh=mesh, in_specs=P("expert"), out_specs=P(None, "expert"), check_vma=False)(x)

    with pytest.raises(ValueError, match=r"jax.shard_map holds all_gather over the axes \('stage',\), .*axis_names="):
        chosen(function, [(REPLICATED, REPLICATED)], (8, 4))

    def named(x):  # as the error proposes
        inside = lambda x: lax.all_gather(x, "expert", tiled=True)
        options = {"in_specs": P("expert"), "out_specs": P(), "axis_names": {"expert"}, "check_vma": False}
        return jax.shard_map(inside, mesh=mesh, **options)(x)

    plan = chosen(named, [(REPLICATED, REPLICATED)], (8, 4))
    assert plan.results == ((REPLICATED, REPLICATED),)
