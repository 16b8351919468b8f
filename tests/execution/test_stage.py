"""What the compiler makes of a stage: nothing that a layer computes leaves the loop that says whether it runs."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jpipe

WIDTHS = [4, 8, 6, 10, 12, 14]
"""The widths of layers that are products of matrices; two of them look alike, on different stages."""


def loops_around(operation: str, hlo: str) -> list[tuple[str, int]]:
    """For each such operation of a compiled program, its layer's name and the number of loops around it."""
    computations = dict(re.findall(r"^(?:ENTRY )?(%\S+) .*?\{\n(.*?)^\}", hlo, re.MULTILINE | re.DOTALL))
    callers: dict[str, tuple[str, int]] = {}
    for name, body in computations.items():
        for what, called in re.findall(r"(body|condition|calls|to_apply)=(%[^\s,)}]+)", body):
            callers[called] = name, int(what == "body")
    found = []
    for name, body in computations.items():
        depth, at = 0, name
        while at in callers:
            at, loop = callers[at]
            depth += loop
        found += [(label, depth) for label in re.findall(rf" {operation}\(.*?op_name=\"[^\"]*?(layer\d+)", body)]
    return found


def product_layer(i: int, width: int) -> jpipe.Layer:
    def init(key, x):
        with jax.named_scope(f"layer{i}"):
            return jax.random.normal(key, (x.shape[-1], width), jnp.float32) / 2

    def apply(w, x):
        with jax.named_scope(f"layer{i}"):
            return jnp.sin(x @ w)

    return jpipe.Layer(init, apply, name=f"layer{i}")


def pipeline(num_microbatches: int, layers=None, num_stages: int = 2, **options):
    """A pipeline of layers that are unlike, or of these; shapes of a batch; and of its variables."""
    made = [product_layer(i, width) for i, width in enumerate(WIDTHS)]
    sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches, "balance": "even"}
    pipe = jpipe.Pipeline(layers or made, lambda y, _: jnp.sum(y), **sizes, **options)
    batch = {"inputs": jax.ShapeDtypeStruct((2 * num_microbatches, 3), jnp.float32)}
    return pipe, batch, jax.eval_shape(pipe.init, jax.random.key(0), batch)


@pytest.mark.parametrize(
    ("order", "m", "v", "remat"),
    [
        ("1f1b", 4, 1, "none"),
        ("interleaved", 4, 2, "stage"),
        pytest.param("1f1b", 4, 1, "layer", marks=pytest.mark.slow),
        pytest.param("naive", 1, 1, "full", marks=pytest.mark.slow),
    ],
)
def test_a_stage_computes_its_own_layers_only(order, m, v, remat):
    """A regression: the backward of a layer alone in its group was moved out of its loop and run by every stage."""
    pipe, batch, _ = pipeline(m, num_chunks=v, schedule=order, remat=remat)
    state = pipe.abstract_state(batch, optax.sgd(0.1))
    program = jax.jit(pipe.train_step, donate_argnums=0).lower(state, batch).compile().as_text()
    found = loops_around("dot", program)
    assert len(found) >= 3 * len(WIDTHS) - 1  # forward, and two backward (one in the first layer)
    # around each: the scan over ticks, the action, the layers of its group
    assert [pair for pair in found if pair[1] != 3] == []


@pytest.mark.parametrize(("order", "m", "remat"), [("1f1b", 3, "none"), ("1f1b", 3, "full"), ("naive", 1, "layer")])
def test_a_stage_lacks_equal_layers_that_others_have_one_of(order, m, remat):
    """A regression: the first and the third stage have one each, so that their position selects nothing."""
    first, equal, *others = (product_layer(i, width) for i, width in enumerate([4, 5, 3, 4, 6]))
    layers = [first, equal, *others[:2], equal, others[2]]
    pipe, batch, variables = pipeline(m, layers, 3, schedule=order, remat=remat)
    program = jax.jit(pipe.value_and_grad).lower(variables, batch).compile().as_text()
    found = loops_around("dot", program)
    assert {name for name, _ in found} == {f"layer{i}" for i in range(5)}
    assert [pair for pair in found if pair[1] != 3] == []


def test_a_stage_makes_its_own_variables_only():
    """A regression: layers alone in their groups were initialised by every stage."""
    pipe, batch, _ = pipeline(4)
    program = jax.jit(pipe.init).lower(jax.random.key(0), batch).compile().as_text()
    found = loops_around("log-plus-one", program)  # of the normal distribution
    assert {name for name, _ in found} == {f"layer{i}" for i in range(len(WIDTHS))}
    assert [pair for pair in found if pair[1] != 1] == []


def test_a_stage_updates_its_own_parameters_only():
    def update(updates, params):
        del params
        with jax.named_scope("layer0"):
            return jax.tree.map(lambda w: w @ w.T @ w, updates)

    *_, variables = pipeline(4)
    tx = jpipe.per_layer(optax.stateless(update))
    program = jax.jit(lambda grads: tx.update(grads, tx.init(grads))[0]).lower(variables["params"]).compile().as_text()
    found = loops_around("dot", program)
    assert len(found) == 2 * len(WIDTHS)
    assert [pair for pair in found if pair[1] != 1] == []


def test_each_parameter_is_moved_once_forward_and_once_backward():
    """Out of its buffer by one slice an action; its gradient is read and written once, whole if it is alone there."""
    pipe, batch, variables = pipeline(4)
    program = jax.jit(pipe.value_and_grad).lower(variables, batch).as_text()
    storage = variables["params"].layout.storage
    leaves = [name for known in storage.record_types for name in known.buffers]
    assert len(leaves) == len(WIDTHS)
    for name, buffer in storage.buffers.items():
        operand = rf".*: \(tensor<{'x'.join(map(str, buffer.shape))}xf32>"
        alone = len(buffer.shape) > 1 and buffer.shape[0] == 1
        slices, updates = (2, 0) if alone else (3, 1)
        assert len(re.findall("stablehlo.dynamic_slice" + operand, program)) == slices * leaves.count(name)
        assert len(re.findall("stablehlo.dynamic_update_slice" + operand, program)) == updates * leaves.count(name)
