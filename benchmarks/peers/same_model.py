"""The model that all peers train, from numpy alone: sizes, weights from one seed, tokens, and the loss written out.

A decoder of pre-norm blocks: causal softmax attention and a feed-forward of four times the width with the tanh form of
GELU, each with biases; an embedding before, a norm and a matrix to logits after; mean cross entropy; plain SGD. It
imports no framework, so that every peer's own interpreter can import it.
"""

import argparse
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

import numpy as np

EPSILON = 1e-6
"""What a layer norm adds to the variance."""

RATE = 0.1
"""Of SGD."""

Tree = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Of the model and its mini-batch of `batch` rows of `seq` tokens."""

    layers: int = 8
    width: int = 256
    heads: int = 4
    seq: int = 128
    vocab: int = 256
    batch: int = 32
    microbatches: int = 8

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        for field in fields(cls):
            parser.add_argument(f"--{field.name}", type=int, default=field.default, help="(default %(default)s)")

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Sizes":
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})

    def arguments(self) -> list[str]:
        """The same as command-line options."""
        return [f"--{field.name}={getattr(self, field.name)}" for field in fields(self)]


def make_weights(sizes: Sizes, seed: int = 0) -> Tree:
    """Float32 weights by name, `[in, out]` as they multiply from the right; `blocks` is a list of such dicts.

    The columns of `qkv` are those of queries, keys and values, each head by head.
    """
    random, width = np.random.default_rng(seed), sizes.width
    normal = lambda *shape: (random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
    small = lambda n: (0.1 * random.standard_normal(n)).astype(np.float32)

    def norm() -> Tree:
        return {"scale": 1 + small(width), "bias": small(width)}

    def dense(outputs: int, inputs: int = width) -> Tree:
        return {"kernel": normal(inputs, outputs), "bias": small(outputs)}

    def block() -> Tree:
        attention = {"norm_attention": norm(), "qkv": dense(3 * width), "out": dense(width)}
        return attention | {"norm_mlp": norm(), "up": dense(4 * width), "down": dense(width, 4 * width)}

    embedding = random.standard_normal((sizes.vocab, width)).astype(np.float32)
    blocks = [block() for _ in range(sizes.layers)]
    return {"embedding": embedding, "blocks": blocks, "head": {"norm": norm(), "logits": dense(sizes.vocab)}}


def make_tokens(sizes: Sizes, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, `[batch, seq]`."""
    random, shape = np.random.default_rng(seed), (sizes.batch, sizes.seq)
    return tuple(random.integers(0, sizes.vocab, shape).astype(np.int32) for _ in range(2))


def _norm(x: Any, w: Tree, xp: ModuleType) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    return centred / xp.sqrt(variance + EPSILON) * w["scale"] + w["bias"]


def _dense(x: Any, w: Tree) -> Any:
    return x @ w["kernel"] + w["bias"]


def _log_softmax(x: Any, xp: ModuleType) -> Any:
    x = x - x.max(-1, keepdims=True)
    return x - xp.log(xp.exp(x).sum(-1, keepdims=True))


def _block(x: Any, w: Tree, heads: int, xp: ModuleType) -> Any:
    rows, seq, width = x.shape
    qkv = _dense(_norm(x, w["norm_attention"], xp), w["qkv"]).reshape(rows, seq, 3, heads, width // heads)
    q, k, v = (qkv[:, :, i].swapaxes(1, 2) for i in range(3))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(width // heads)
    causal = np.tril(np.ones((seq, seq), bool))
    shares = xp.exp(_log_softmax(xp.where(causal, scores, -1e30), xp))
    x = x + _dense((shares @ v).swapaxes(1, 2).reshape(rows, seq, width), w["out"])
    h = _dense(_norm(x, w["norm_mlp"], xp), w["up"])
    h = 0.5 * h * (1 + xp.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    return x + _dense(h, w["down"])


def plain_loss(weights: Tree, inputs: Any, targets: Any, heads: int, xp: ModuleType = np) -> Any:
    """The mean cross entropy, in the weights' own precision; `xp` is numpy or what is called like it."""
    x = weights["embedding"][inputs]
    for w in weights["blocks"]:
        x = _block(x, w, heads, xp)
    logits = _dense(_norm(x, weights["head"]["norm"], xp), weights["head"]["logits"])
    right = xp.take_along_axis(_log_softmax(logits, xp), targets[..., None], -1)
    return -right.mean()
