import jax

from jpipe.forecasting.measured_chip import measure_chip


def test_a_device_is_measured():
    """Bounds that any machine keeps, and no figure that is forgotten (0) or infinite does."""
    chip = measure_chip(jax.devices()[:2])
    assert 1e8 < chip.flops < 1e15
    assert 1e7 < chip.memory_bandwidth < 1e13
    assert 2**20 < chip.memory < 2**50
    assert chip.clock is None and chip.name == jax.devices()[0].device_kind
