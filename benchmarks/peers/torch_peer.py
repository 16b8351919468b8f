"""The model in PyTorch: one process, or two stages by `torch.distributed.pipelining`, a process each.

Variants are words joined by commas: "single", "gpipe" or "1f1b"; then "written" for attention as the other peers have
it, else PyTorch's `scaled_dot_product_attention`; "accumulated" for a single process that takes micro-batches; and
"compiled" for `torch.compile`.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from same_model import EPSILON, RATE, Sizes, Tree, make_tokens, make_weights
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from turns import parse_variant, serve, take_standard_output

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def dense(w: Tree) -> nn.Linear:
    layer = nn.Linear(*w["kernel"].shape)
    layer.weight.data = torch.from_numpy(w["kernel"].T.copy())
    layer.bias.data = torch.from_numpy(w["bias"])
    return layer


def norm(w: Tree) -> nn.LayerNorm:
    layer = nn.LayerNorm(len(w["scale"]), eps=EPSILON)
    layer.weight.data, layer.bias.data = torch.from_numpy(w["scale"]), torch.from_numpy(w["bias"])
    return layer


def written_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ v


class Block(nn.Module):
    def __init__(self, w: Tree, heads: int, written: bool):
        super().__init__()
        self.norm_attention, self.norm_mlp = norm(w["norm_attention"]), norm(w["norm_mlp"])
        self.qkv, self.out, self.up, self.down = (dense(w[name]) for name in ("qkv", "out", "up", "down"))
        self.heads, self.written = heads, written

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, seq, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(rows, seq, 3, self.heads, width // self.heads)
        q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
        h = written_attention(q, k, v) if self.written else F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).reshape(rows, seq, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


def make_stage(sizes: Sizes, index: int, stages: int, written: bool) -> nn.Sequential:
    """The layers of one of `stages` stages; embedding and head are with the first and the last block."""
    weights, count = make_weights(sizes), sizes.layers // stages
    mine = weights["blocks"][index * count : (index + 1) * count]
    layers: list[nn.Module] = [Block(w, sizes.heads, written) for w in mine]
    if index == 0:
        layers.insert(0, nn.Embedding.from_pretrained(torch.from_numpy(weights["embedding"]), freeze=False))
    if index == stages - 1:
        layers += [norm(weights["head"]["norm"]), dense(weights["head"]["logits"])]
    return nn.Sequential(*layers)


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def single_step(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, parts: int) -> Callable[[], float]:
    tx = torch.optim.SGD(model.parameters(), lr=RATE)

    def step() -> float:
        tx.zero_grad()
        total = 0.0
        for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            loss = loss_fn(model(x), y) / parts
            loss.backward()
            total += loss.item()
        tx.step()
        return total

    return step


def pipelined_step(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, sizes: Sizes, schedule: str
) -> Callable[[], float | None]:
    index, stages = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(model, index, stages, torch.device("cpu"))
    pipe = SCHEDULES[schedule](stage, sizes.microbatches, loss_fn=loss_fn)
    tx = torch.optim.SGD(model.parameters(), lr=RATE)

    def step() -> float | None:
        tx.zero_grad()
        losses: list[torch.Tensor] = []
        ends = {"target": targets, "losses": losses} if stage.is_last else {}
        pipe.step(*[inputs] * stage.is_first, **ends)
        tx.step()
        return sum(loss.item() for loss in losses) / len(losses) if losses else None

    return step


def main() -> None:
    options, sizes, (kind, *words) = parse_variant(__doc__)
    answers = take_standard_output()
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    stages = 1 if kind == "single" else 2
    inputs, targets = (torch.from_numpy(a).long() for a in make_tokens(sizes))
    model = make_stage(sizes, options.index, stages, "written" in words)
    if "compiled" in words:
        model.compile()
    if kind == "single":
        step = single_step(model, inputs, targets, sizes.microbatches if "accumulated" in words else 1)
    else:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{options.port}", rank=options.index, world_size=stages)
        step = pipelined_step(model, inputs, targets, sizes, kind)
    serve(step, answers)
    if kind != "single":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
