import jax
import jax.numpy as jnp

from jpipe.forecasting.liveness import working_bytes

X = jax.ShapeDtypeStruct((8, 8), "float32")
ARRAY = 8 * 8 * 4


def of(function, *shapes, **options):
    return working_bytes(jax.make_jaxpr(function)(*shapes), **options)


def test_elementwise_operations_need_nothing_of_their_own():
    assert of(lambda x: jnp.where(x > 0, x + 1, x) * 2, X) == 0
    assert of(lambda x: jnp.sum(x * x), X) == 4


def test_a_product_lives_until_its_last_reader():
    assert of(lambda x: x @ x, X) == ARRAY
    assert of(lambda x: (x @ x) @ x, X) == 2 * ARRAY
    assert of(lambda x: jnp.sum((x @ x) + (x @ x.T @ x)), X) == 3 * ARRAY


def test_what_isnt_fused_reads_a_copy_of_a_slice():
    assert of(lambda x: x @ x, X, copied=[0]) == 2 * ARRAY
    assert of(lambda x: x + x, X, copied=[0]) == 0


def test_a_products_operand_that_lies_otherwise_is_turned():
    batched = jax.ShapeDtypeStruct((4, 2, 4), "float32")
    product = lambda a, b: jax.lax.dot_general(a, b, (((2,), (2,)), ((1,), (1,))))
    assert of(product, batched, batched) == (2 * 4 * 4 + 2 * 4 * 2 * 4) * 4


def test_a_loop_needs_what_its_body_does():
    loop = lambda x: jax.lax.scan(lambda c, _: (jnp.tanh(c @ c) @ c, None), x, length=3)[0]
    assert of(loop, X) >= 3 * ARRAY


def test_dead_code_is_free():
    assert of(lambda x: (x @ x, x)[1], X) == 0
