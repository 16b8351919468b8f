"""The memory model against compiled training steps: what it predicts, and what compilers for TPU, GPU and CPU say.

What compilers said is kept in `benchmarks/data/memory_model.csv`; a point that is there isn't compiled again, unless
`--again` asks for it.
"""

import argparse
import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from axes_models import LinenBlock, Row, Sizes, dense, dense_specs
from common import Size, batch_shapes, lowered_step, make_layers, mib, on_cpu, show, transformer_pipeline, versions
from jax.sharding import Mesh

import jpipe
from jpipe.tools.chips import ABSENT, parse_topology
from jpipe.tools.memory_model import predict_memory

COMPILED = ("arguments", "temporaries", "host_arguments", "host_temporaries")
PARTS = ("parameters", "optimizer", "gradients", "other_variables", "batch", "boundaries", "residuals", "work", "casts")
ON_HOSTS = {"residuals": "host_residuals", "optimizer": "host_optimizer"}
KEPT = Path(__file__).parent / "data" / "memory_model.csv"
OPTIMIZERS = {"adam": optax.adam(1e-3), "sgd": optax.sgd(1e-3)}
SPLIT = Row("dense", dense, lambda sizes: dense_specs(sizes, many="tensor"), {"tensor": 2})
"""A block of Llama, split as Megatron splits it."""


@dataclass(frozen=True)
class Point:
    """A model and a pipeline; the defaults are what most points have.

    Attributes:
      where: "cpu", or a slice of TPUs, or GPUs.
      K, M, V: stages, micro-batches, chunks a stage.
      schedule, remat, ends: of `jpipe.Pipeline`.
      tx: the optimiser.
      data: devices that examples are split over; parameters too, if `fsdp` is 1.
      tensor: devices that a layer is split over.
      width, layers, vocab, seq: of the Transformer, blocks in all.
      micro: examples of a micro-batch, of all devices.
      offload: what lies on the hosts, as "residuals+optimizer" or "residuals=0.5".
    """

    where: str = "v5e:2x4"
    K: int = 4
    M: int = 8
    V: int = 1
    schedule: str = "1f1b"
    remat: str = "layer"
    tx: str = "adam"
    ends: str = "own"
    data: int = 1
    fsdp: int = 0
    tensor: int = 1
    width: int = 1024
    layers: int = 8
    vocab: int = 8192
    seq: int = 512
    micro: int = 4
    offload: str = ""

    def __str__(self) -> str:
        plain = Point()
        others = {n: value for n, value in asdict(self).items() if value != getattr(plain, n) and n != "where"}
        is_word = lambda name, value: isinstance(value, str) and name != "offload"
        return ", ".join([self.where, *(v if is_word(n, v) else f"{n}={v}" for n, v in others.items())])

    @property
    def size(self) -> Size:
        """In float32 on CPU."""
        dtype = "float32" if self.where == "cpu" else "bfloat16"
        return Size(self.layers, self.width, self.width // 128, self.seq, self.vocab, self.micro, dtype)

    def pipeline(self, devices: Sequence[Any]) -> jpipe.Pipeline:
        """The pipeline on the first of some devices."""
        axes = {"stage": self.K, "data": self.data, "tensor": self.tensor}
        axes = {name: n for name, n in axes.items() if n > 1 or name == "stage"}
        mesh = Mesh(np.asarray(devices[: math.prod(axes.values())]).reshape([*axes.values()]), [*axes])
        layers = make_layers(self.size)
        if self.tensor > 1:
            heads, hidden = self.size.heads, 4 * self.width
            sizes = Sizes(self.width, heads, heads, hidden, self.seq, self.micro, self.vocab, dtype=self.size.dtype)
            layers[1:-1] = [LinenBlock(SPLIT, sizes) for _ in layers[1:-1]]
        options = {"schedule": self.schedule, "remat": self.remat, "num_chunks": self.V}
        over = {"shard_over": "data"} if self.fsdp else {}
        shares = (part.partition("=") for part in filter(None, self.offload.split("+")))
        options["offload"] = {word: float(share or 1) for word, _, share in shares}
        return transformer_pipeline(self.size, self.K, self.M, layers, mesh=mesh, ends=self.ends, **options, **over)

    def predicted(self) -> dict[str, int]:
        """Bytes of a device and on its host, by part, as the model says, on CPUs or on what stands for GPUs."""
        topology = None if self.where == "cpu" else parse_topology(self.where)
        devices = (topology and topology.stand_ins()) or jax.devices("cpu")
        pipe, batch = self.pipeline(devices), batch_shapes(self.size, self.M)
        asked = pipe.planner, batch, OPTIMIZERS[self.tx], topology and topology.chip
        on_device, on_hosts = predict_memory(*asked)
        return {**on_device, **{column: on_hosts.get(name, 0) for name, column in ON_HOSTS.items()}}

    def compiled(self) -> dict[str, int]:
        """Bytes of a device and on its host, as the compiler says them."""
        devices = jax.devices("cpu") if self.where == "cpu" else parse_topology(self.where).devices()
        pipe, batch = self.pipeline(devices), batch_shapes(self.size, self.M)
        lowered = lowered_step(pipe, OPTIMIZERS[self.tx], batch)
        memory = lowered.compile(ABSENT if devices[0].platform == "gpu" else None).memory_analysis()
        left = memory.output_size_in_bytes - memory.alias_size_in_bytes
        host_left = memory.host_output_size_in_bytes - memory.host_alias_size_in_bytes
        return {
            "arguments": memory.argument_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes + left,
            "host_arguments": memory.host_argument_size_in_bytes,
            "host_temporaries": memory.host_temp_size_in_bytes + host_left,
        }


def _points(text: str, **common: Any) -> Iterator[Point]:
    """A point a line; what it says besides `common`, as "K=2 schedule=v"."""
    kinds = {field.name: type(field.default) for field in fields(Point)}
    for line in text.strip().splitlines():
        said = dict(word.split("=", 1) for word in line.split())
        yield Point(**common | {name: kinds[name](value) for name, value in said.items()})


POINTS = [
    *_points(
        """
        offload=residuals width=512
        offload=residuals remat=none width=512
        offload=residuals=0.5 remat=none width=512
        offload=boundaries schedule=interleaved V=2 width=512
        offload=residuals schedule=v V=2 remat=none width=512
        offload=residuals schedule=zero_bubble remat=none width=512
        offload=residuals data=2 K=2 layers=4 width=512 remat=none M=16
        offload=residuals data=2 fsdp=1 width=512
        offload=residuals tensor=2 width=512 remat=none
        offload=residuals K=8 M=16 layers=16 width=512
        offload=residuals K=2 M=16 layers=4 width=512 remat=none
        offload=residuals schedule=gpipe width=512 M=16
        """,
        vocab=2048,
    ),
    *_points(
        """
        offload=residuals
        offload=residuals remat=none
        offload=residuals schedule=interleaved V=2
        """,
        where="v5p:2x2x2",
        vocab=2048,
    ),
    *_points(
        """
        offload=residuals width=512
        offload=residuals remat=none width=512
        offload=residuals=0.5 remat=none width=512
        offload=residuals schedule=interleaved V=2 width=512
        offload=residuals schedule=zero_bubble remat=none width=512
        offload=residuals data=2 fsdp=1 width=512
        """,
        where="h100:8",
        vocab=2048,
    ),
    *_points(
        """
        remat=none
        remat=full schedule=gpipe M=16
        schedule=interleaved V=2
        schedule=zero_bubble remat=none
        data=2 K=2 layers=4
        data=2 fsdp=1
        ends=spread vocab=32768
        tensor=2
        schedule=v V=2
        schedule=gpipe remat=none tx=sgd
        ends=shared vocab=32768
        remat=stage
        K=2 width=2048 layers=4 micro=2
        schedule=interleaved V=2 remat=stage data=2
        data=2 fsdp=1 remat=full schedule=gpipe
        K=8 M=16 layers=16
        schedule=v V=2 remat=none
        ends=spread remat=full
        tensor=2 remat=none K=2 layers=4
        schedule=zero_bubble
        seq=1024 micro=2 remat=stage schedule=gpipe
        schedule=interleaved V=2 remat=none M=4
        """
    ),
    *_points(
        """
        remat=layer
        remat=none schedule=gpipe
        remat=full
        schedule=interleaved V=2 M=4
        schedule=zero_bubble remat=none M=4
        data=2 tx=sgd
        data=2 fsdp=1 remat=none
        ends=spread vocab=32768
        tensor=2
        schedule=v V=2 remat=none M=4
        ends=shared vocab=32768 remat=stage
        K=2 layers=8 micro=8
        width=1024 seq=2048 micro=2
        schedule=gpipe remat=stage M=16 micro=1
        data=2 fsdp=1 schedule=interleaved V=2
        tensor=2 data=2 K=2 layers=4
        schedule=zero_bubble tx=sgd
        ends=shared tensor=1 remat=none
        """,
        where="v5p:2x2x2",
        width=2048,
        vocab=16384,
        seq=1024,
        micro=2,
    ),
    *_points(
        """
        remat=layer
        remat=none
        remat=stage
        remat=full schedule=gpipe M=16
        schedule=interleaved V=2
        schedule=zero_bubble remat=none
        schedule=zero_bubble
        schedule=v V=2
        schedule=v V=2 remat=none
        data=2 K=2 layers=4
        data=2 fsdp=1
        ends=spread vocab=32768
        tensor=2
        schedule=gpipe remat=none tx=sgd
        K=2 width=2048 layers=4 micro=2
        K=8 M=16 layers=16
        tensor=2 remat=none K=2 layers=4
        seq=1024 micro=2 remat=stage schedule=gpipe
        ends=shared vocab=32768
        """,
        where="h100:8",
    ),
    *_points(
        """
        remat=layer
        remat=none
        schedule=zero_bubble
        data=2 fsdp=1
        """,
        where="b200:8",
    ),
    *_points(
        """
        K=2 M=4 remat=none
        K=2 M=4 remat=full
        K=2 M=4 remat=stage tx=sgd
        remat=layer schedule=gpipe
        schedule=zero_bubble remat=none tx=sgd
        schedule=interleaved V=2 remat=full tx=sgd
        K=2 data=2 schedule=interleaved V=2 remat=stage
        K=2 data=2 schedule=interleaved V=2 tx=sgd
        data=2 fsdp=1
        data=2 fsdp=1 remat=none schedule=gpipe
        ends=spread vocab=8192
        ends=shared vocab=8192
        tensor=2
        schedule=v V=2
        K=2 data=2 fsdp=1 tensor=2 remat=stage
        schedule=zero_bubble
        width=512
        width=512 remat=full schedule=gpipe M=16
        width=512 remat=none K=2
        width=512 schedule=v V=2 remat=none
        width=512 schedule=interleaved V=2
        width=512 remat=stage tx=sgd
        width=512 data=2 fsdp=1 K=2
        width=512 schedule=zero_bubble remat=none
        width=512 ends=spread vocab=4096
        K=8 layers=16
        width=512 K=2 layers=4 tx=sgd
        width=512 data=2 K=2 remat=none
        width=512 tensor=2 K=2 remat=none
        width=512 schedule=gpipe remat=stage
        K=2 schedule=v V=2 tx=sgd
        M=16 data=2 schedule=gpipe
        """,
        where="cpu",
        width=256,
        vocab=1024,
        seq=128,
    ),
]


def kept() -> dict[Point, dict[str, int]]:
    """What was predicted and compiled before, by point."""
    kinds = {field.name: type(field.default) for field in fields(Point)}
    with KEPT.open() as file:
        rows = [dict(row) for row in csv.DictReader(file)]
    point = lambda row: Point(**{name: kind(row[name]) for name, kind in kinds.items()})
    return {point(row): {name: int(row[name]) for name in row.keys() - kinds.keys()} for row in rows}


def keep(rows: dict[Point, dict[str, int]]) -> None:
    """Writes them, in the order of the grid."""
    columns = (*COMPILED, *PARTS, *ON_HOSTS.values())
    lines = [asdict(point) | {name: rows[point][name] for name in columns} for point in POINTS if point in rows]
    with KEPT.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def shown(point: Point, row: dict[str, int]) -> tuple[str, str, str, str]:
    """A row of the table: (the step, predicted, compiled, error)."""
    predicted, compiled = totals(row)
    return str(point), mib(predicted), mib(compiled), f"{predicted / compiled - 1:+.1%}"


def hosted(point: Point, row: dict[str, int]) -> tuple[str, str, str, str]:
    """A row of the table of hosts, as `shown`."""
    predicted, compiled = on_host(row)
    return str(point), mib(predicted), mib(compiled), f"{predicted / compiled - 1:+.1%}"


def on_host(row: dict[str, int]) -> tuple[int, int]:
    """(predicted, compiled), of what lies on the host."""
    return sum(row[name] for name in ON_HOSTS.values()), row["host_arguments"] + row["host_temporaries"]


def totals(row: dict[str, int]) -> tuple[int, int]:
    """(predicted, compiled)."""
    return sum(row[name] for name in PARTS), row["arguments"] + row["temporaries"]


def summary(rows: dict[Point, dict[str, int]]) -> list[tuple[str, str, str, str, str]]:
    """By chip: (where, points, median error, worst, points within 10 %)."""
    found = []
    for chip in ("v5e", "v5p", "h100", "b200", "cpu", ""):
        pairs = [totals(row) for point, row in rows.items() if point.where.startswith(chip)]
        errors = np.asarray([predicted / compiled - 1 for predicted, compiled in pairs])
        sizes = np.abs(errors)
        worst = f"{errors[sizes.argmax()]:+.1%}"
        found.append((chip or "all", f"{len(sizes)}", f"{np.median(sizes):.1%}", worst, f"{(sizes <= 0.1).sum()}"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", type=int, default=0, help="compile so many points that were not compiled yet")
    parser.add_argument("--where", nargs="+", default=["v5e", "v5p", "h100", "b200", "cpu"], help="only for these")
    parser.add_argument("--again", action="store_true", help="compile those too that are kept")
    on_cpu(8)
    rows, options = kept(), parser.parse_args()
    wanted = [point for point in POINTS if point.where.partition(":")[0] in options.where]
    missing = [point for point in wanted if options.again or point not in rows][: options.compile]
    for point in missing:
        rows[point] = point.compiled()
        rows[point] |= point.predicted()
        keep(rows)
    rows = {point: row | point.predicted() for point, row in rows.items()}
    keep(rows)
    caption = f"{versions(tpu=bool(missing))}; TPU and GPU steps compiled without the devices"
    show(
        "Bytes of a step, MiB a device",
        ("step", "predicted", "compiled", "error"),
        [shown(*row) for row in rows.items()],
        caption,
    )
    show(
        "On the host, MiB for each device",
        ("step", "predicted", "compiled", "error"),
        [hosted(*row) for row in rows.items() if on_host(row[1])[1]],
        caption,
    )
    show("Errors", ("where", "points", "median", "worst", "within 10 %"), summary(rows), caption)


if __name__ == "__main__":
    main()
