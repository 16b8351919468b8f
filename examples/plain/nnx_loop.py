"""Handwritten digits by an nnx model: `nnx.Optimizer`, and one jitted step."""

import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits


def split(*axes):  # over a mesh axis called `model`, where there is one
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.up = nnx.Linear(64, 128, kernel_init=split(None, "model"), rngs=rngs)
        self.down = nnx.Linear(128, 64, kernel_init=split("model", None), rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


rngs = nnx.Rngs(0)
with nnx.use_eager_sharding(False):  # there is no mesh yet
    blocks = [Block(rngs) for _ in range(8)]
model = nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), *blocks, nnx.Linear(64, 10, rngs=rngs))


def loss_fn(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


@nnx.jit
def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(lambda model: loss_fn(model(batch["inputs"]), batch))(model)
    optimizer.update(model, grads)
    return loss


images, targets = load_digits(return_X_y=True)
digits = {"inputs": (images / 16).astype(np.float32), "targets": targets.astype(np.int32)}
training, tested = ({name: a[part] for name, a in digits.items()} for part in (slice(1440), slice(1440, None)))
random = np.random.default_rng(0)

optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
for step in range(61):
    chosen = random.choice(1440, 128, replace=False)
    batch = {name: array[chosen] for name, array in training.items()}
    loss = train_step(model, optimizer, batch)
    if step % 15 == 0:
        print(f"step {step}: loss {loss:.3f}")

logits = model(tested["inputs"])
print(f"test accuracy {np.mean(np.argmax(logits, -1) == tested['targets']):.1%}")
