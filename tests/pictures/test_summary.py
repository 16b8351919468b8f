"""A pipeline as a table: before a batch was seen and after, in text and in HTML."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from html_tables import cells

BATCH = {"inputs": np.ones((4, 3), np.float32)}


def make(**options) -> jpipe.Pipeline:
    layers = [nn.Dense(4), nn.Dense(4), nn.Dense(4), lambda x: jnp.tanh(x)]
    return jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), num_stages=2, num_microbatches=2, **options)


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_pipeline_before_and_after_a_batch(num_chunks):
    schedule = "interleaved" if num_chunks > 1 else "1f1b"
    pipe = make(num_chunks=num_chunks, schedule=schedule)
    header = ["stage", "chunk"][:num_chunks]
    before = cells(pipe._repr_html_())
    assert before[0] == [*header, "in flight", "devices"]
    assert [row[0] for row in before[1:]] == ["0", "1"] * num_chunks
    assert "the layers are cut when a batch is seen (balance='flops')" in str(pipe)
    pipe.abstract_state(BATCH, tx=optax.sgd(0.1))
    after = cells(pipe._repr_html_())
    assert after[0] == [*header, "layers", "what", "cost", "parameters", "in flight", "devices"]
    assert len(after) == 1 + 2 * num_chunks
    column = {name: [row[i] for row in after[1:]] for i, name in enumerate(after[0])}
    assert sum(int(number.replace(",", "")) for number in column["parameters"]) == 16 + 20 + 20
    assert column["devices"] == ["cpu:0", "cpu:1"] * num_chunks
    assert column["in flight"] == list(map(str, jpipe.simulate(pipe.schedule).peak_in_flight)) * num_chunks
    for line, row in zip(str(pipe).splitlines()[1:], after, strict=False):
        assert line.split() == " ".join(row).split()
    assert repr(pipe) == str(pipe).splitlines()[0] and "\n" not in repr(pipe)


def test_names_are_escaped():
    pipe = make(balance="even")
    html = pipe._repr_html_()
    assert "lambda" in html and "<lambda>" not in html and "&lt;lambda&gt;" in html
    assert "<lambda>" in str(pipe)
    assert cells(html)[0] == ["stage", "layers", "what", "in flight", "devices"]


def test_devices_of_a_stage_are_counted():
    mesh = jax.make_mesh((4, 2), ("data", "stage"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = cells(make(mesh=mesh)._repr_html_())
    assert [row[-1] for row in rows[1:]] == ["cpu:0 cpu:2 cpu:4 cpu:6", "cpu:1 cpu:3 cpu:5 cpu:7"]
