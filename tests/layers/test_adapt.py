"""All that a layer may be, behind one interface."""

import functools
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jpipe
from cases import assert_close
from jpipe.layers.adapt import as_layers
from jpipe.layers.base import is_same


def test_names():
    layers = [nn.Dense(3), nn.Dense(3, name="out"), nn.relu, lambda x: x, jpipe.Layer(max, min, name="mine")]
    names = [layer.name for layer in as_layers([*layers, lambda rngs: nnx.Linear(2, 3, rngs=rngs)])]
    assert names == ["Dense", "out", "relu", "<lambda>", "mine", "Linear"]


def test_sequentials_are_opened():
    assert [layer.name for layer in as_layers(nn.Sequential([nn.Dense(3), nn.tanh]))] == ["Dense", "tanh"]
    linear = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    assert [layer.name for layer in as_layers(nnx.Sequential(linear, jnp.tanh))] == ["Linear", "tanh"]
    assert len(as_layers((nn.Dense(3), nn.Dense(3)))) == 2


SAME = [
    lambda: nn.Dense(3),
    lambda: nn.Sequential([nn.Dense(3), nn.relu]),
    lambda: lambda rngs: nnx.Linear(4, 3, rngs=rngs),
    lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0)),
    lambda: jpipe.Layer(max, min),
    lambda: (lambda scale: jpipe.Layer(max, lambda params, x: scale * x))(2),
]
DIFFER = [
    [(lambda scale: jpipe.Layer(max, lambda params, x: scale * x))(np.ones(1)) for _ in range(2)],
    (nn.Dense(3), nn.Dense(4)),
    (nn.Dense(3), nn.Dense(3, kernel_init=nn.initializers.zeros)),
    (lambda rngs: nnx.Linear(4, 3, rngs=rngs), lambda rngs: nnx.Linear(4, 5, rngs=rngs)),
    [
        lambda rngs, init=i: nnx.Linear(4, 3, kernel_init=init, rngs=rngs)
        for i in (nnx.initializers.ones, nnx.initializers.zeros)
    ],
    (lambda rngs: nnx.Dropout(0.1, rngs=rngs), lambda rngs: nnx.Dropout(0.2, rngs=rngs)),
    (lambda rngs: nnx.Linear(4, 3, rngs=rngs), nnx.Linear(4, 3, rngs=nnx.Rngs(0))),
    (nn.relu, nn.tanh),
]


PAIRS = [
    *(((make(), make()), True) for make in SAME),
    ((nn.Dense(3, name="a"), nn.Dense(3, name="b")), True),
    *((pair, False) for pair in DIFFER),
]


@pytest.mark.parametrize(("pair", "same"), PAIRS)
def test_layers_are_the_same_or_differ(pair, same):
    first, second = as_layers([*pair])
    assert is_same(first, second) is is_same(second, first) is same
    assert is_same(first, first)


@pytest.mark.parametrize("layer", [nn.Dense, nnx.Linear, functools.partial(nn.Dense, 4)])
def test_classes_are_no_layers(layer):
    """A regression: "is a type", which names neither the class nor what to do."""
    with pytest.raises(TypeError, match=r"layers\[0\] is the class (Dense|Linear), which makes layers and is none"):
        as_layers([layer])


def test_functions_that_name_a_module():
    """Of a layer they are refused (tests/layers/test_base.py); alone it is theirs, as often as they stand."""
    frozen = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    function = lambda x: frozen(x)
    assert len(as_layers([function, nn.relu, function, lambda x: frozen(x)])) == 4


# --- models of other libraries ----------------------------------------------------------------------------------------


@jax.tree_util.register_pytree_node_class
class OfEquinox:
    """A linear map of one example, as equinox's modules are: a pytree, which is called."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, x):
        return jnp.tanh(self.weight @ x)

    def tree_flatten(self):
        return (self.weight,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


class OfKeras:
    """The same, of a batch, as Keras' models are on its JAX backend."""

    def __init__(self, weight):
        self.trainable_variables = [SimpleNamespace(value=weight)]
        self.non_trainable_variables = [SimpleNamespace(value=jnp.zeros(()))]

    def __call__(self, x):
        return self.stateless_call([v.value for v in self.trainable_variables], [], x)[0]

    def stateless_call(self, trainable, non_trainable, x):
        return jnp.tanh(x @ trainable[0].T), non_trainable


OfEquinox.__module__, OfKeras.__module__ = "equinox.nn._linear", "keras.src.layers.core.dense"
EQX = SimpleNamespace(partition=lambda model, _: (model, None), combine=lambda params, _: params, is_inexact_array=None)


@pytest.mark.parametrize(
    ("model", "passed", "words"),
    [
        (OfEquinox, lambda model: model, "layers is a OfEquinox; wrap the equinox model:"),
        (OfEquinox, lambda model: [model], r"layers\[0\] is a OfEquinox; wrap the equinox model:"),
        (OfEquinox, lambda model: [nn.Dense(4), jax.vmap(model)], r"layers\[1\] is a function; wrap the equinox"),
        (OfEquinox, lambda model: jpipe.freeze(model), "layers is a Frozen; wrap the equinox model:"),
        (OfKeras, lambda model: model, r"layers is a OfKeras; wrap the Keras model \(JAX backend\), once it is built:"),
        (OfKeras, lambda model: [jpipe.Shared(model)], r"layers\[0\] is a OfKeras; wrap the Keras model"),
    ],
)
def test_models_of_equinox_and_keras(key, model, passed, words):
    """A regression: in a list each was a function without parameters, and stayed as it was. The lines it says work."""
    model = model(jax.random.normal(key, (3, 4)))
    with pytest.raises(TypeError, match=words) as info:
        jpipe.Pipeline(passed(model), lambda y, batch: jnp.mean(y**2), num_stages=1, num_microbatches=2)
    _, definition, layer = str(info.value).split("\n")
    names = {"eqx": EQX, "jax": jax, "jpipe": jpipe, "model": model}
    exec(definition.strip(), names)
    pipe = jpipe.Pipeline([eval(layer, names)], lambda y, batch: jnp.mean(y**2), num_stages=1, num_microbatches=2)
    batch = {"inputs": np.ones((4, 4), np.float32)}
    _, grads = pipe.value_and_grad(pipe.init(key, batch), batch)
    weight = jax.tree.leaves(model)[0] if isinstance(model, OfEquinox) else model.trainable_variables[0].value
    wanted = jax.grad(lambda w: jnp.mean(jnp.tanh(batch["inputs"] @ w.T) ** 2))(weight)
    (of_layer,) = pipe.layer_variables({"params": grads})
    assert_close(jax.tree.leaves(of_layer), [wanted])


def test_a_model_of_hugging_face():
    """Its class isn't known here: it has a Linen module as `.module`, and `.params`, which may refuse to be read."""

    class OfHuggingFace:
        module = nn.Dense(4)

        @property
        def params(self):
            raise ValueError("`params` cannot be accessed from model when the model is created with `_do_init=False`")

        def __call__(self, x):
            return x

    words = r"pass its `\.module`, and {\"params\": model\.params} to pipe\.from_model_variables"
    for passed in (OfHuggingFace(), [OfHuggingFace()], jpipe.freeze(OfHuggingFace())):
        with pytest.raises(TypeError, match=words):
            jpipe.Pipeline(passed, None, num_stages=1, num_microbatches=1)


def test_what_only_looks_like_another_librarys():
    """A function of equinox without arrays, such as an activation, is a function like any other."""
    assert as_layers([OfEquinox("no array")])[0].name == "OfEquinox"
