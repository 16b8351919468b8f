import jax
import jax.numpy as jnp

from jpipe.costs.liveness import Compiler, working_bytes

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


def test_what_is_tied_is_not_copied():
    def chain(x, tie):
        y = x @ x
        return jnp.sum(tie(y, x)[0] @ x)

    tied = lambda x: chain(x, lambda *values: jax.lax.optimization_barrier(values))
    assert of(tied, X) == of(lambda x: chain(x, lambda *values: values), X)
    assert of(tied, X, compiler=TPU) == of(lambda x: chain(x, lambda *values: values), X, compiler=TPU)


def test_what_isnt_fused_reads_a_copy_of_a_slice():
    assert of(lambda x: x @ x, X, copied=[0]) == 2 * ARRAY
    assert of(lambda x: x + x, X, copied=[0]) == 0


def test_each_product_reads_a_copy_of_its_own():
    assert of(lambda x: (x @ x.T, x @ x), X, copied=[0]) == 4 * ARRAY  # each reads it once; and two results


TPU = Compiler(into_products=True, in_place=True)


def test_a_tpus_products_read_and_give_what_is_elementwise():
    assert of(lambda x: jnp.sum(jnp.tanh(x @ x) @ x, 0) @ x, X, compiler=TPU) == 2 * ARRAY
    assert of(lambda x: (x @ x).astype("bfloat16"), X, compiler=TPU) == 0  # added to a sum elsewhere
    assert of(lambda x: x @ x, X, copied=[0], compiler=TPU) == 0


def test_a_gpus_elementwise_results_take_the_place_of_what_they_read_and_its_products_turn_nothing():
    """Two arrays of logits were counted as three: predicted steps with a large vocabulary were a sixth too large."""
    gpu = Compiler(in_place=True)
    chain = lambda x: jnp.tanh(x @ x) @ x[0]
    assert (of(chain, X), of(chain, X, compiler=gpu)) == (2 * ARRAY, ARRAY + 2 * 8 * 4)  # and x[0], and the result
    turned = lambda x: jax.lax.dot_general(x, x, (((0,), (1,)), ((), ())))
    assert of(turned, X, compiler=gpu) == ARRAY < of(turned, X)


def test_arrays_lie_on_the_chip_while_there_is_room():
    products = lambda x: ((x @ x) @ x) @ x
    most = lambda near: of(products, X, compiler=Compiler(into_products=True, near=near, in_place=True))
    assert [most(near * ARRAY) for near in (0, 1, 2)] == [2 * ARRAY, ARRAY, 0]


def test_numbers_are_scattered_in_place():
    shapes = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((64,), "int32")
    zeros, most = 64 * 64 * 4, of(lambda x, i: jnp.zeros_like(x).at[jnp.arange(64), i].add(1.0) @ x, *shapes)
    assert zeros < most < 3 * zeros


def test_a_products_operand_that_lies_otherwise_is_turned():
    batched = jax.ShapeDtypeStruct((4, 2, 4), "float32")
    product = lambda a, b: jax.lax.dot_general(a, b, (((2,), (2,)), ((1,), (1,))))
    assert of(product, batched, batched) == (2 * 4 * 4 + 2 * 4 * 2 * 4) * 4


def test_a_loop_needs_what_its_body_does():
    loop = lambda x: jax.lax.scan(lambda c, _: (jnp.tanh(c @ c) @ c, None), x, length=3)[0]
    assert of(loop, X) >= 3 * ARRAY


def test_dead_code_is_free():
    assert of(lambda x: (x @ x, x)[1], X) == 0
