"""Functions that all layers share."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jpipe.layers.base import describe, positional


def test_positional():
    assert positional((1, 2)) == (1, 2)
    assert positional([1, 2]) == ([1, 2],)
    assert positional({"a": 1}) == ({"a": 1},)


@jax.tree_util.register_pytree_node_class
class Logits(NamedTuple):
    """Takes apart what it holds if that can be iterated, as the outputs of `transformers` do."""

    logits: object

    def tree_flatten(self):
        return (self.logits,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        if not hasattr(children[0], "shape") and hasattr(children[0], "__iter__"):
            raise TypeError("it can't be iterated")
        return cls(*children)


def test_outputs_that_take_strings_apart_are_described():
    assert describe(Logits(jnp.zeros((2, 3)))) == "Logits(logits=float32[2,3])"
