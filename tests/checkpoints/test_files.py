"""Files: what orbax writes and reads for us, some arrays at a time, and what can't be read."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cases import assert_equal
from jpipe.checkpoints import files

NAMED = {
    ("layers", "0000_Dense", "params", "a/b"): jnp.arange(8, dtype=jnp.bfloat16),
    ("layers", "0000_Dense", "params", "none"): jnp.zeros((0, 3)),
    ("layers", "0001_Dense", "params", "kernel"): jnp.arange(6.0).reshape(2, 3),
    ("optimizer", "0", "count"): jnp.int32(7),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A directory with step 3, and what it says of itself."""
    directory = files.as_path(tmp_path_factory.mktemp("run"))
    about = {"arrays": [[list(path), a.dtype.name, list(a.shape)] for path, a in NAMED.items()]}
    manager = files.make_manager(directory, keep=None)
    files.write(manager, 3, NAMED, about)
    manager.close()
    return directory / "3", about


def test_what_is_written_is_read_on_the_host_or_split(written, make_mesh):
    directory, about = written
    assert files.read_about(directory) == {"format": 1, **about}
    shapes = files.shapes_in(about)
    found = files.read_arrays(directory, shapes)
    assert all(isinstance(array, np.ndarray) for array in found.values())
    assert_equal(found, jax.device_get(NAMED))
    path, split = (
        ("layers", "0001_Dense", "params", "kernel"),
        NamedSharding(make_mesh((2,), ("stage",)), PartitionSpec("stage")),
    )
    some = files.read_arrays(directory, {path: shapes[path].update(sharding=split)})
    assert set(some) == {path}, "the others aren't read"
    assert some[path].sharding == split
    assert_equal(some[path], NAMED[path])


def test_what_is_not_there_is_damaged(written, tmp_path):
    directory, about = written
    with pytest.raises(files.DamagedError, match="no item 'about'"):
        files.read_about(files.as_path(tmp_path))
    with pytest.raises(files.DamagedError, match=r"^layers: "):
        files.read_arrays(directory.parent / "4", files.shapes_in(about))
    missing = {("layers", "0001_Dense", "params", "bias"): jax.ShapeDtypeStruct((3,), jnp.float32)}
    with pytest.raises(files.DamagedError, match=r"^layers: KeyError: '0001_Dense/params/bias'"):
        files.read_arrays(directory, files.shapes_in(about) | missing)  # orbax gave the shape itself back


def test_a_newer_format_is_no_damage(tmp_path):
    (tmp_path / "about").mkdir()
    (tmp_path / "about" / "metadata").write_text(json.dumps({"format": 3}))
    with pytest.raises(ValueError, match=r"has the format .* reads up to .* use a newer jpipe"):
        files.read_about(files.as_path(tmp_path))


def test_steps_the_newest_first_and_those_set_aside_no_more(tmp_path):
    directory = files.as_path(tmp_path)
    for name in ("1", "20", "3", "damaged-3", "3.orbax-checkpoint-tmp-7", "other"):
        (directory / name).mkdir()
    assert files.steps_in(directory) == [20, 3, 1]
    files.set_aside(directory, [3, 20])
    assert files.steps_in(directory) == [1]
    assert (directory / "damaged-3-1").is_dir() and (directory / "damaged-20").is_dir()
    assert files.listed(directory / "nowhere") == []
