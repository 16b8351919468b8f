import jax
import jax.numpy as jnp

from jpipe.seam.absent_cudnn import absent_cudnn

HEADS = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)


def traced():
    """The shapes that attention by cuDNN gives, or JAX's words against it; traced anew."""

    def attention(x):
        return jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation="cudnn")

    try:
        return jax.eval_shape(attention, HEADS)
    except RuntimeError as error:
        return str(error)


def test_attention_by_cudnn_is_traced_where_there_is_none():
    with absent_cudnn():
        assert traced() == HEADS


def test_afterwards_jax_says_the_same_as_before():
    before = traced()
    with absent_cudnn():
        pass
    assert traced() == before
