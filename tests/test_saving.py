"""What is laid out over devices is not saved as it is; the error says what to save instead."""

import pytest
from flax import serialization

import jpipe.saving
from jpipe.memory.layout import StageTree
from jpipe.training.train_state import TrainState


@pytest.mark.parametrize("kind", [StageTree, TrainState])
def test_flax_refuses_and_names_the_remedy(kind):
    jpipe.saving.register()  # again: it replaces what it registered
    for call in (serialization.to_state_dict, lambda target: serialization.from_state_dict(target, {})):
        with pytest.raises(TypeError, match=r"save tree = jax\.device_get\(pipe\.model_variables\(variables\)\)"):
            call(kind.__new__(kind))
