"""Products beside the transfers that they wait for: values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from blocks import SHAPES, SPECS, WIDTH, attention, block, feed_forward, flat, gradients, shared
from jpipe.jax.inside import needed_part
from jpipe.partitioner import find_rings, per_device, rings
from jpipe.partitioner.choice import always
from jpipe.partitioner.per_device import jaxpr_per_device
from jpipe.partitioner.rings import Ring
from jpipe.partitioner.shardings import Axis, Shard
from tpu_program import compile_with_text, needs_tpu_compiler, read, tpu_devices, transfers

ORDERS = {2: (0, 1), 3: (0, 1, 2), 4: (0, 1, 3, 2)}


@pytest.fixture
def however_small(monkeypatch):
    for least in ("LEAST_FLOPS", "LEAST_IF_SHARED", "LEAST_OF_SUMS", "LEAST_OF_WEIGHTS"):
        monkeypatch.setattr(find_rings, least, 0.0)


@pytest.mark.parametrize(("devices", "alone"), [(2, True), (3, False), (4, True), (4, False)])
@pytest.mark.parametrize("between", [P("data", "model"), P("data", None), P(None, "model")], ids=str)
@pytest.mark.parametrize("function", [feed_forward, attention, block, flat, shared])
def test_values_and_gradients(monkeypatch, however_small, function, between, devices, alone):
    monkeypatch.setattr(rings, "LEAST_ROWS", 0 if alone else 512)
    mesh = jax.make_mesh((2, devices), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[: 2 * devices])
    rng = np.random.default_rng(0)
    with jax.enable_x64():
        weights = {name: jnp.asarray(rng.normal(size=(12, 12)) / 4) for name in SHAPES}
        x = jnp.asarray(rng.normal(size=(4, 24, 12)))
        for of, results in ((function, between), (gradients(function), (between, SPECS))):
            specs = {"in_specs": (between, SPECS), "out_specs": results}
            run = per_device(of, mesh, **specs, data_axes=["data"], rings={"model": ORDERS[devices]})
            found = jax.jit(jax.shard_map(run, mesh=mesh, check_vma=False, **specs))(x, weights)
            expected = of(x, weights)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("between", [P("data", "model"), P("data", None)], ids=str)
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("function", [feed_forward, attention, block, shared])
def test_weights_split_over_data_axes_arrive_beside_the_products_that_read_them(
    monkeypatch, however_small, function, devices, between, rows
):
    monkeypatch.setattr(rings, "LEAST_ROWS", 0)
    sizes = {"data": devices, "model": 8 // devices}
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * 2)
    rng = np.random.default_rng(0)
    with_data = lambda spec: P(*("data" if name is None else name for name in spec))
    lying = {name: with_data(SPECS[name]) if rows else P("model", "data") for name in SHAPES}
    with jax.enable_x64():
        weights = {name: jnp.asarray(rng.normal(size=(8, 8)) / 4) for name in SHAPES}
        x = jnp.asarray(rng.normal(size=(4, 16, 8)))
        for of, results in ((function, between), (gradients(function), (between, lying))):
            specs, texts = {"in_specs": (between, lying), "out_specs": results}, []
            on_rings = ["data", *(["model"] if between[1] else [])]
            for orders in ({}, {name: ORDERS[sizes[name]] for name in on_rings}):
                run = per_device(of, mesh, **specs, data_axes=["data"], rings=orders)
                run = jax.jit(jax.shard_map(run, mesh=mesh, check_vma=False, **specs))
                texts.append(run.lower(x, weights).as_text())
            for a, b in zip(jax.tree.leaves(run(x, weights)), jax.tree.leaves(of(x, weights)), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)
            assert "collective_permute" not in texts[0]
            if of is not function and rows and not between[1]:  # others have to be gathered along `model` too
                assert "collective_permute" in texts[1]


def cut_again(x, w):
    """A weight whose gathered dimension is cut again once it is a part of another."""
    return x @ w.reshape(-1, w.shape[-1])


def of_fewer_dimensions(x, w):
    """A sum that gets a dimension more before it is scattered."""
    return (x[0] @ w)[None] * jnp.ones((4, 1))


@pytest.mark.parametrize(
    ("function", "shapes", "in_specs", "out_specs"),
    [
        (cut_again, ((4, 16), (2, 8, 64)), (P("model", None), P(None, "model", None)), P()),
        (cut_again, ((4, 16), (2, 8, 64)), (P("model", None), P(None, "model", None)), P("model")),
        (of_fewer_dimensions, ((4, 8), (8, 8)), (P(None, "model"), P("model")), P(None, "model")),
    ],
)
def test_shapes_that_change_on_the_way(however_small, function, shapes, in_specs, out_specs):
    """They raised errors."""
    mesh = jax.make_mesh((2,), ("model",), (AxisType.Auto,), devices=jax.devices()[:2])
    rng, specs = np.random.default_rng(0), {"in_specs": in_specs, "out_specs": out_specs}
    with jax.enable_x64():
        arguments = [jnp.asarray(rng.normal(size=shape)) for shape in shapes]
        run = per_device(function, mesh, **specs, rings={"model": (0, 1)})
        found = jax.jit(jax.shard_map(run, mesh=mesh, check_vma=False, **specs))(*arguments)
        np.testing.assert_allclose(found, function(*arguments), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "rings", [{"model": (0, 1)}, {"model": (0, 1, 1, 2)}, {"modle": (0, 1, 2, 3)}, {"data": (0, 2)}]
)
def test_no_order_of_an_axis(rings):
    """They gave wrong numbers."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match=r"is no order of the devices 0, 1, ... of an axis of the mesh"):
        per_device(jnp.sin, mesh, P("data"), P("data"), data_axes=["data"], rings=rings)


@pytest.mark.parametrize(
    ("size", "pieces"),
    [
        (2, [(0,), (-1,)]),
        (3, [(0,), (-1, 1)]),
        (4, [(0,), (-1, 1), (-2,)]),
        (8, [(0,), (-1, 1), (-2, 2), (-3, 3), (-4,)]),
    ],
)
def test_pieces_arrive_from_both_sides(size, pieces):
    ring = Ring(Axis(("model",), (size,), ring=tuple(range(size))))
    assert ring.outwards == ring.groups(rings.LEAST_ROWS - 1) == pieces
    assert ring.groups(rings.LEAST_ROWS) == [(k,) for together in pieces for k in together]


@needs_tpu_compiler
def test_tpus_multiply_beside_all_transfers():
    """A feed-forward of width 2048 and 2,048 tokens: by two rings of three permutations, or a gather and a scatter."""
    mesh = Mesh(np.asarray(tpu_devices("v5p:2x2x1")), ("model",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(None, "model"), SPECS), "out_specs": P(None, "model")}
    place = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    weights = {name: place((128 * a, 256 * b), SPECS[name]) for name, (a, b) in SHAPES.items() if name in "gu"}
    weights["d"] = place((256 * SHAPES["d"][0], 128 * SHAPES["d"][1]), SPECS["d"])
    arguments = place((1, 2048, 128 * WIDTH), specs["in_specs"][0]), weights
    specs["in_specs"] = specs["in_specs"][0], {name: SPECS[name] for name in weights}

    def compiled(orders):
        run = per_device(feed_forward, mesh, **specs, rings=orders)
        return read(
            compile_with_text(jax.jit(jax.shard_map(run, mesh=mesh, check_vma=False, **specs)).lower(*arguments))[1]
        )

    found = transfers(compiled({"model": ORDERS[4]}))
    assert len(found) == 6 and all(one.beside_products for one in found)
    assert not any(one.beside_products for one in transfers(compiled({}), ("all-gather", "reduce-scatter")))


@pytest.mark.parametrize("late", [0, 2])
def test_gradients_of_weights_leave_one_by_one_and_nothing_else_waits_for_them(however_small, late):
    def backward(w, v, x, cotangent):
        return jax.vjp(lambda w, v, x: x @ w @ v, w, v, x)[1](cotangent)

    axes, split = (Axis(("data",), (4,), is_data=True, ring=(0, 1, 2, 3)),), (Shard(0),)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8), (8, 8), (16, 8), (16, 8))]
    lying = [split] * 4
    made = jaxpr_per_device(jax.make_jaxpr(backward)(*shapes), axes, lying, [always(split)] * 3, late=late).jaxpr
    cotangent = needed_part(made, [False, False, True])[0]
    ties = [sum(e.primitive.name == "optimization_barrier" for e in one.jaxpr.eqns) for one in (made, cotangent)]
    assert ties == [4 if late else 0, 0]
