import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from gpu_program import needs_gpu_compiler
from jpipe.costs.chips import CHIPS, parse_topology


@needs_gpu_compiler
@pytest.mark.parametrize("name", [name for name, chip in CHIPS.items() if chip.gpu])
def test_a_product_compiles_for_every_gpu(name):
    (device,) = parse_topology(f"{name}:1").devices()
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=SingleDeviceSharding(device))
    compiled = jax.jit(lambda x: x @ x).lower(x).compile({"xla_gpu_autotune_level": 0})
    assert compiled.memory_analysis().argument_size_in_bytes == 2 * 256**2


def test_descriptions_agree_with_data_sheets():
    """The device says a little more memory than is sold, and XLA's bandwidth is that of the memory's clock."""
    for chip in CHIPS.values():
        if chip.gpu:
            assert chip.memory <= chip.gpu.memory < 1.1 * chip.memory
            assert chip.gpu.memory_bandwidth == pytest.approx(chip.memory_bandwidth, rel=0.05)
