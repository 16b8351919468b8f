"""google-tunix's Qwen3 with experts over `fsdp`, whose `jax.shard_map` names all mesh axes; see `tunix_experts`."""

import pytest

from tpu_program import needs_tpu_compiler
from tunix_worker import call as call

HELPER = "tunix_experts"


@pytest.mark.parametrize("gather", ["step", "use"])
def test_its_path_for_experts_equals_its_dense_one(call, gather):
    assert call("check", gather) > 40


@pytest.mark.slow
@needs_tpu_compiler
def test_its_path_for_experts_compiles_for_tpus_and_joins_no_stages(call):
    assert "ragged-all-to-all" in call("compiled")
