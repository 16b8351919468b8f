"""Residuals that go to the host while they wait change nothing of what a step computes."""

import jax
import pytest

from cases import assert_close, assert_equal, model, pipeline
from device_programs import programs_for


def gradients(truth, case, **options):
    """(loss, gradients by layer, the step) of a pipeline."""
    pipe = pipeline(truth, *case, **options)
    variables = pipe.from_layer_variables(truth.trees, truth.batch)
    (loss, _), grads = pipe.value_and_grad(variables, truth.batch)
    step = pipe.planner.training_step(pipe.planner.for_training(truth.batch))
    return loss, pipe.layer_variables({"params": grads}), step


@pytest.mark.filterwarnings("ignore:offload= moves nothing on CPUs")
@pytest.mark.parametrize(
    ("kind", "case", "remat", "offload", "devices"),
    [
        ("linen", ("1f1b", 4, 6), "none", "residuals", "cpu"),
        ("linen", ("1f1b", 3, 4), "none", {"residuals": 0.5}, "gpu"),
        ("mixed", ("interleaved", 2, 4, 2), "none", "residuals", "tpu"),
        ("linen", ("zero_bubble", 3, 6), "none", ("residuals",), "gpu"),
        pytest.param("mixed", ("v", 2, 4, 2), "none", "residuals", "gpu", marks=pytest.mark.slow),
        pytest.param("alternating", ("gpipe", 3, 4), "layer", "boundaries", "cpu", marks=pytest.mark.slow),
        pytest.param("linen", ("one slot", 3, 6), "none", "residuals", "cpu", marks=pytest.mark.slow),
        pytest.param("linen", ("zb-v", 2, 6, 2), "none", "residuals", "gpu", marks=pytest.mark.slow),
        pytest.param("nnx factories", ("dualpipe-v", 2, 4, 2), "layer", "boundaries", "tpu", marks=pytest.mark.slow),
        pytest.param("mixed", ("zb-h2", 3, 6), "none", "residuals", "cpu", marks=pytest.mark.slow),
    ],
)
def test_a_step_is_the_same_to_the_bit(kind, case, remat, offload, devices):
    with jax.enable_x64(True), programs_for(devices):
        truth = model(kind, "float64")
        loss, grads, _ = gradients(truth, case, remat=remat)
        found, found_grads, step = gradients(truth, case, remat=remat, offload=offload)
        assert step.kept.away, "nothing goes"
        assert_equal(found_grads, grads)
        assert found == loss
        assert_close(found_grads, truth.truth[2], "gradients")
