"""Calls layers as they decode: with a token or a few at a time, and with Flax's caches.

A cache is Flax's own: the collection `cache` of a Linen module with a field `decode`, or the `nnx.Cache` variables that
`init_cache` makes. It is as long as the sequence that the layer is initialised for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx

from jpipe.layers.base import Activation, AnyLayer, Around, Context, Inputs, LayerVariables, Passing, innermost
from jpipe.layers.connections import ConnectedLayer, no_batch
from jpipe.layers.flax import LinenLayer, NnxLayer
from jpipe.layers.functions import signature_of
from jpipe.types import Batch, Shapes

CACHE = "cache"
"""The collection that a decoding layer writes, of Linen modules and of `nnx.Cache` variables."""


def keeps_cache(layer: AnyLayer) -> bool:
    """Whether a layer has a decode mode of its own."""
    inner = innermost(layer)
    if isinstance(inner, LinenLayer):
        return _has_decode_field(inner)
    parts = nnx.iter_graph(nnx.merge(inner.graphdef, inner.template)) if isinstance(inner, NnxLayer) else ()
    return any(callable(getattr(part, "init_cache", None)) for _, part in parts)


def _has_decode_field(layer: LinenLayer) -> bool:
    return "decode" in {field.name for field in dataclasses.fields(layer.module)}


def decoding(layer: AnyLayer, takes: Shapes, size: int, length: int) -> AnyLayer:
    """The layer in decode mode, with caches for sequences of a length. A layer without such a mode stays as it is.

    A side input is None, since there is no batch.

    Args:
      layer: any layer.
      takes: what it takes in training, `[b, T, ...]`; a pytree of shapes.
      size: the sequences that it is called with at a time.
      length: of the longest sequence.
    """
    if isinstance(layer, Around):
        layer = replace(layer, inner=decoding(layer.inner, takes, size, length))
        return replace(layer, read=no_batch) if isinstance(layer, ConnectedLayer) and layer.read else layer
    if isinstance(layer, LinenLayer) and _has_decode_field(layer):
        layer = replace(layer, module=layer.module.clone(decode=True), writes=(CACHE,))
    elif isinstance(layer, NnxLayer):
        first = jax.tree.leaves(takes)[0]
        dtype = first.dtype if jnp.issubdtype(first.dtype, jnp.floating) else jnp.dtype(jnp.float32)
        layer = _nnx_decoding(layer, (size, length, *(first.shape[2:] or (1,))), dtype)
    return DecodingLayer(layer, length)


def _nnx_decoding(layer: NnxLayer, shape: tuple[int, ...], dtype: jnp.dtype) -> NnxLayer:
    """An nnx layer with all its modules in decode mode, with caches for inputs of this shape.

    A cache has the dtype in which its module computes, if the module names one, else `dtype`.
    """
    factory = layer.factory
    if factory is None:  # a ready module's values stay where they are
        zeros = lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), layer.ready)
        factory = lambda rngs: nnx.merge(layer.graphdef, layer.state(zeros(), None))

    def prepared(module: object) -> nnx.Module:
        assert isinstance(module, nnx.Module)
        no_method = lambda _, part: not callable(getattr(part, "decode", None))  # that of a table is another thing
        module.set_attributes(no_method, decode=True, raise_if_not_found=False)
        for _, part in nnx.iter_graph(module):
            make = getattr(part, "init_cache", None)
            if callable(make):
                computes_in = getattr(part, "dtype", None) or dtype
                make(shape, **({"dtype": computes_in} if "dtype" in signature_of(make) else {}))
        return module

    made = NnxLayer.from_factory(lambda rngs: prepared(factory(rngs=rngs)), 0)
    return replace(made, method=layer.method, shared=layer.shared, writes=(CACHE,))


@dataclass(frozen=True)
class DecodingLayer(Passing):
    """A layer in decode mode: it takes a few tokens at a time, in evaluation mode, and gives its new cache.

    Attributes:
      length: of the sequences that it is initialised for.
    """

    length: int

    @property
    def reads_batch(self) -> bool:
        return self.inner.reads_batch

    @property
    def made_of(self) -> Sequence[object]:
        return type(self.inner), self.inner.made_of, self.length

    def init(self, key: jax.Array, inputs: Inputs, batch: Batch) -> LayerVariables:
        """Makes variables as for whole sequences, so that the cache is as long as these."""
        whole = lambda a: jnp.zeros((a.shape[0], self.length, *a.shape[2:]), a.dtype)
        return self.inner.init(key, jax.tree.map(whole, inputs), batch)

    def apply(self, variables: LayerVariables, inputs: Inputs, context: Context) -> tuple[Activation, LayerVariables]:
        return self.inner.apply(variables, inputs, Context(None, False, context.batch))
