"""Has models with attention by cuDNN traced, and compiled for a GPU, on machines without it."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def absent_cudnn(version: int = 90800) -> Iterator[None]:
    """Has JAX trace attention by cuDNN on a machine without it, as if it were there in this version (9.8.0).

    `jax.nn.dot_product_attention(implementation="cudnn")` becomes a call that any machine can compile for a GPU. But
    before that JAX asks the CUDA plugin for cuDNN's version, to refuse a few shapes, and no option answers in its
    place. Without this a model with such attention can't be planned or compiled on a machine without cuDNN: JAX says
    "cuDNN is not detected", or "cuDNN not found".
    """
    try:
        from jax._src.cudnn import fused_attention_stablehlo as attention

        asked = attention.check_cudnn_version
    except (ImportError, AttributeError):
        yield
        return

    def check() -> int:
        try:
            return asked()
        except RuntimeError:
            return version

    attention.check_cudnn_version = check
    try:
        yield
    finally:
        attention.check_cudnn_version = asked
