"""Handwritten digits by a Linen model: a `TrainState` of Flax, and one jitted step."""

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import jpipe

jax.config.update("jax_num_cpu_devices", 4)  # only to try it without accelerators


def split(*axes):  # over a mesh axis called `model`, where there is one
    return nn.with_partitioning(nn.initializers.lecun_normal(), axes)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(128, kernel_init=split(None, "model"))(nn.LayerNorm()(x))
        return x + nn.Dense(64, kernel_init=split("model", None))(nn.gelu(h))


model = nn.Sequential([nn.Dense(64), *[Block() for _ in range(8)], nn.Dense(10)])


def loss_fn(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


@jax.jit
def train_step(state, batch):
    (loss, _), grads = pipe.value_and_grad({"params": state.params}, batch)
    return state.apply_gradients(grads=grads), loss


images, targets = load_digits(return_X_y=True)
digits = {"inputs": (images / 16).astype(np.float32), "targets": targets.astype(np.int32)}
training, tested = ({name: a[part] for name, a in digits.items()} for part in (slice(1440), slice(1440, None)))
random = np.random.default_rng(0)

pipe = jpipe.Pipeline(model, loss_fn, num_stages=4, num_microbatches=8)
params = model.init(jax.random.key(0), training["inputs"])["params"]
params = pipe.from_layer_variables([{"params": layer} for layer in params.values()], training)["params"]
state = TrainState.create(apply_fn=pipe.apply, params=params, tx=optax.adamw(1e-3))
state = pipe.place_state(state, state.tx)
for step in range(61):
    chosen = random.choice(1440, 128, replace=False)
    batch = {name: array[chosen] for name, array in training.items()}
    state, loss = train_step(state, batch)
    if step % 15 == 0:
        print(f"step {step}: loss {loss:.3f}")

logits = state.apply_fn({"params": state.params}, tested["inputs"])
print(f"test accuracy {np.mean(np.argmax(logits, -1) == tested['targets']):.1%}")
