"""Meshes whose axes lie along the links that suit them: stages across the slowest, other axes never across slices."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jpipe
from jpipe.partitioner.users_mesh import as_mesh, check_context
from tpu_program import needs_tpu_compiler, tpu_devices


@dataclass(frozen=True)
class Device:
    """As much of a device as decides where it goes."""

    id: int
    process_index: int
    slice_index: int | None = None
    platform: str = "gpu"
    device_kind: str = "imagined"


def fakes(processes: int, each: int, slices: int | None = None) -> list[Any]:
    """Devices of several processes, which are shared out equally over slices."""
    slice_of = lambda p: None if slices is None else p * slices // processes
    return [Device(p * each + i, p, slice_of(p)) for p in range(processes) for i in range(each)]


def along(mesh: Any, axis: str, what: str) -> set[int]:
    """How many different processes (or slices) there are in the rows of devices along an axis."""
    values = np.vectorize(lambda device: getattr(device, what), otypes=[int])(mesh.devices)
    rows = np.moveaxis(values, mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])
    return {len(set(row)) for row in rows.tolist()}


@pytest.fixture
def imagined(monkeypatch):
    """`make_mesh` of devices that aren't there."""

    class Mesh:
        def __init__(self, devices, axis_names, axis_types):
            self.devices, self.axis_names, self.axis_types = devices, axis_names, axis_types
            self.shape = dict(zip(axis_names, devices.shape, strict=True))

    monkeypatch.setattr("jpipe.partitioner.users_mesh.Mesh", Mesh)
    return jpipe.make_mesh


def test_stage_is_first_and_axes_are_auto():
    mesh = jpipe.make_mesh(model=2, data=2, stage=2)
    assert mesh.axis_names == ("stage", "model", "data")
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert list(mesh.devices.flat) == jax.devices()
    explicit = jpipe.make_mesh(stage=4, devices=jax.devices()[:4], axis_types=AxisType.Explicit)
    assert explicit.axis_types == (AxisType.Explicit,)


@pytest.mark.parametrize("what", ["process_index", "slice_index"])
def test_stage_goes_across_processes_or_slices_and_others_stay_within(imagined, what):
    devices = fakes(4, 4, slices=4 if what == "slice_index" else None)
    mesh = imagined(stage=4, data=2, model=2, devices=devices)
    assert (along(mesh, "stage", what), along(mesh, "data", what), along(mesh, "model", what)) == ({4}, {1}, {1})
    by_two = imagined(stage=2, data=4, model=2, devices=devices)
    assert (along(by_two, "stage", what), along(by_two, "data", what)) == ({2}, {2}), "data takes what stage leaves"
    assert along(by_two, "model", what) == {1}
    longer = imagined(stage=8, model=2, devices=devices)
    stages = [{getattr(d, what) for d in row.flat} for row in longer.devices]
    assert stages == [{0}, {0}, {1}, {1}, {2}, {2}, {3}, {3}], "neighbours in a slice come one after the other"


@needs_tpu_compiler
@pytest.mark.parametrize(
    "topology, sizes",
    [("v5e:4x4", {"stage": 4, "data": 2, "model": 2}), ("v5p:2x2x4", {"stage": 4, "data": 2, "model": 2})],
)
def test_in_a_tpu_slice_the_last_axis_has_neighbours(topology, sizes):
    """Of a topology of the TPU's compiler: `model` is within one host, and each step along `stage` one link."""
    mesh = jpipe.make_mesh(**sizes, devices=tpu_devices(topology))
    assert dict(mesh.shape) == sizes
    assert along(mesh, "model", "process_index") == {1}
    for here, there in zip(mesh.devices[:-1].flat, mesh.devices[1:].flat, strict=True):
        assert sum(abs(a - b) for a, b in zip(here.coords, there.coords, strict=True)) == 1


@needs_tpu_compiler
def test_two_slices_of_tpus():
    devices = tpu_devices("v5e:2x4", num_slices=2)
    mesh = jpipe.make_mesh(stage=2, data=4, model=2, devices=devices)
    assert along(mesh, "stage", "slice_index") == {2}
    assert along(mesh, "data", "slice_index") == along(mesh, "model", "slice_index") == {1}
    assert along(mesh, "model", "process_index") == {1}
    with pytest.raises(
        ValueError, match=r"2 slices of .8, 8., over which only 'stage' and data axes may go, and stage=1"
    ):
        jpipe.make_mesh(stage=1, model=16, devices=devices)


@pytest.mark.parametrize(
    "sizes, kind, message",
    [
        ({"stage": 3, "data": 2}, ValueError, r"stage=3 \* data=2 is 6 devices, not 8; resize"),
        ({"stage": 0}, ValueError, "stage=0 is less than 1"),
        ({"stage": 2, "data": 4.0}, TypeError, "data=4.0 is no integer"),
    ],
)
def test_wrong_sizes(sizes, kind, message):
    with pytest.raises(kind, match=message):
        jpipe.make_mesh(**sizes)


# `tests/end_to_end/test_errors.py` has what a pipeline says of wrong meshes.


def test_no_mesh_is_one_of_stages_alone():
    assert dict(as_mesh(None, 2).shape) == {"stage": 2}
    with pytest.raises(ValueError, match=r"num_stages=9 is more than the 8 cpu devices"):
        as_mesh(None, 9)


def test_a_mesh_stays_as_it_is_or_is_refused(make_mesh):
    mesh = make_mesh((2, 2), ("data", "stage"))
    assert as_mesh(mesh, 2) is mesh
    with pytest.raises(ValueError, match=r"2 devices along 'stage' but num_stages=4"):
        as_mesh(mesh, 4)
    with pytest.raises(ValueError, match="no axis 'stage'"):
        as_mesh(make_mesh((2,), ("data",)), 2)
    with pytest.raises(TypeError, match=r"mesh is a list; pass a Mesh"):
        as_mesh([], 2)
    mixed = Mesh(mesh.devices, mesh.axis_names, axis_types=(jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit))
    with pytest.raises(ValueError, match="all Auto or all Explicit"):
        as_mesh(mixed, 2)


def test_the_mesh_in_context_has_the_same_axes(make_mesh):
    mesh = make_mesh((2, 2), ("data", "stage"))
    check_context(mesh)
    with jax.set_mesh(make_mesh((2,), ("stage",))), pytest.raises(ValueError, match=r"set pipe\.mesh"):
        check_context(mesh)
