"""One layer as a function of leaves: what it is called with, what it gives, and how both lie."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.layers.adapt import as_layers
from jpipe.mesh.splits import WHOLE
from jpipe.model.layer_function import LayerArguments, LayerFunction
from jpipe.model.loss import trace_loss
from jpipe.model.random_keys import key_shape
from jpipe.model.remat import as_remat
from jpipe.model.trace import trace_model

X = jax.ShapeDtypeStruct((2, 4), jnp.float32)
BATCH = {"inputs": X, "scale": jax.ShapeDtypeStruct((2,), jnp.float32)}


class Normed(nn.Module):
    """Has parameters and a batch statistic; `wrong` gives other shapes in evaluation."""

    wrong: bool = False

    @nn.compact
    def __call__(self, x, train=True):
        y = nn.BatchNorm(use_running_average=not train)(x)
        return y if train or not self.wrong else y[:, :2]


def loss_fn(outputs, batch):
    return jnp.sum(outputs * batch["scale"][:, None]), jnp.float32(3), {"largest": jnp.max(outputs)}


def functions_of(*layers, train=True):
    model = trace_model(as_layers([lambda x: x, *layers]), lambda batch: batch["inputs"], BATCH)
    traced = trace_loss(loss_fn, model.groups[-1].gives, BATCH)
    loss = lambda g: traced if g == model.last else None
    key = key_shape() if train else None
    return [LayerFunction(group, key, as_remat("none"), BATCH, loss(g)) for g, group in enumerate(model.groups)]


def test_arguments_hold_what_a_layer_looks_at():
    first, normed, last = functions_of(Normed(), nn.Dense(3))
    assert [leaf.shape for leaf in normed.arguments.params] == [(4,), (4,)]
    assert [leaf.shape for leaf in normed.arguments.state] == [(4,), (4,)]
    assert normed.arguments.batch is None
    assert first.arguments.batch == last.arguments.batch == BATCH
    assert normed.train and not functions_of(Normed(), nn.Dense(3), train=False)[1].train


def test_training_gives_new_state_and_evaluation_none():
    x = [jnp.arange(8.0).reshape(2, 4)]
    for train, count in [(True, 2), (False, 0)]:
        function = functions_of(Normed(), nn.Dense(3), train=train)[1]
        arguments = LayerArguments([jnp.zeros(4), jnp.ones(4)], [jnp.zeros(4), jnp.ones(4)], [], None, None)
        results = jax.eval_shape(lambda x, f=function, a=arguments: f.forward(a._replace(key=None), x), x)
        assert len(results.state) == count
        assert [leaf.shape for leaf in results.outputs] == [(2, 4)]


def test_the_loss_follows_the_last_layer():
    last = functions_of(lambda x: x * 2)[-1]
    x, batch = jnp.arange(8.0).reshape(2, 4), {"inputs": None, "scale": jnp.asarray([1.0, 10.0])}
    loss, largest, count = last.forward(LayerArguments([], [], [], None, batch), [x]).outputs
    np.testing.assert_allclose([loss, largest, count], [2 * (6 + 220) / 3, 14, 1], rtol=1e-6)
    assert last.differentiated([loss, largest, count]) == [loss]


def test_only_floating_point_outputs_are_differentiated():
    both = functions_of(lambda x: (x, x > 0), lambda x, positive: jnp.where(positive, x, 0))[1]
    y, positive = both.forward(LayerArguments([], [], [], None, None), [jnp.ones((2, 4))]).outputs
    assert both.differentiated([y, positive]) == [y]
    shardings = both.shardings(WHOLE)
    assert (len(shardings.outputs or ()), len(shardings.cotangents), len(shardings.gradients)) == (2, 1, 1)


def test_shapes_that_differ_in_evaluation_are_an_error():
    function = functions_of(Normed(wrong=True), nn.Dense(3), train=False)[1]
    arguments = LayerArguments(*[[np.zeros(4, np.float32)] * 2] * 2, [], None, None)
    with pytest.raises(ValueError, match=r"gives float32\[2,2\] in evaluation, not float32\[2,4\] as it was traced"):
        function.forward(arguments, [jnp.ones((2, 4))])
