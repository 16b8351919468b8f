"""google-tunix's Qwen3 with experts over `fsdp`, whose `jax.shard_map` names all mesh axes; see `tunix_experts`."""

import importlib.util

import pytest

from timed import Worker
from tpu_program import needs_tpu_compiler

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tunix") is None, reason="google-tunix isn't installed: pip install -e '.[llama]'"
)


@pytest.fixture(scope="module")
def worker():
    with Worker(limit=300) as worker:  # a collective that waits for a device of another stage would wait for ever
        yield worker


def call(worker, function, *arguments):
    return worker.value("tunix_experts", function, *arguments)


@pytest.mark.parametrize("gather", ["step", "use"])
def test_its_path_for_experts_equals_its_dense_one(worker, gather):
    assert call(worker, "check", gather) > 40


@pytest.mark.slow
@needs_tpu_compiler
def test_its_path_for_experts_compiles_for_tpus_and_joins_no_stages(worker):
    assert "ragged-all-to-all" in call(worker, "compiled")
