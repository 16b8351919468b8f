import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jpipe.forecasting.device_groups import axes_along, groups_of

MESH = Mesh(np.full((2, 4), jax.devices()[0]), ("stage", "model"))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("replica_groups={}", ()),
        ("no group is named", ()),
    ],
)
def test_groups_in_each_way_in_which_they_are_written(text, groups):
    assert groups_of(f"%a = f32[] all-reduce(%b), {text}, to_apply=%add") == groups


def test_another_way_is_refused():
    with pytest.raises(ValueError, match="written in an unknown way"):
        groups_of("%a = f32[] all-reduce(%b), replica_groups=everyone")


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (((0, 1, 2, 3), (4, 5, 6, 7)), ("model",)),
        (((0, 4),), ("stage",)),
        (((0, 5),), ("stage", "model")),
        (((3,),), ()),
    ],
)
def test_a_group_lies_along_the_axes_in_which_its_devices_differ(groups, axes):
    assert axes_along(groups, MESH) == axes
