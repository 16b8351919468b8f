"""What a compiled step of `axes.py` sends, told apart by where: in a layer's forward, its backward, or elsewhere.

Bytes are those that a device sends on a ring of p devices. Of n bytes (the larger of what it takes and what it gives)
an all-reduce sends 2 n (p - 1) / p, an all-gather, a reduce-scatter and an all-to-all n (p - 1) / p, a permute n.
"""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from collectives import Collective, axes_of, read
from compiled_transfers import transfer_seconds, turn_in_time
from jpipe.tools.chips import Network
from tpu_program import Loop
from tpu_program import read as read_loops

PLACES = ("forward", "backward", "micro-batch", "step")
"""Of one layer; what is left of one micro-batch, outside of layers; once a step."""
_SCOPES = {"F": "forward", "B": "backward"}


@dataclass(frozen=True)
class Sent:
    """Collectives that are alike.

    Attributes:
      place: one of `PLACES`.
      kind: one of `collectives.KINDS`.
      types: of the arrays that it gives.
      bytes: n, as above.
      moved: what a device sends of them.
      beside_work: whether work is scheduled between its start and its end.
    """

    place: str
    kind: str
    types: str
    bytes: int
    moved: float
    beside_work: bool


Counts = Counter[Sent]
"""What is sent, and how often each time that its place is run once."""


@dataclass(frozen=True)
class Program:
    """How the loops of a program are known.

    Attributes:
      layer: the name of a layer's scope in jpipe, such as "LinenBlock.1"; None in plain JAX, where blocks have none,
        and for all layers.
      depth: how many loops with "F" or "B" in their scope are around a layer without a name: 1 in plain JAX, 2 where
        there is a tied table, whose ends have none. In jpipe the action may have one around that of its layers.
      turns: how often the loops inside of a layer turn.
      mesh: what it runs on.
      ends: whether layers that aren't in a loop are meant.
    """

    layer: str | None
    depth: int
    turns: int
    mesh: Any
    ends: bool = False

    def place(self, scopes: tuple[str, ...], own: str) -> tuple[str, int] | None:
        """(place, how often), of what was made from `own` in loops that were made from `scopes`.

        None for layers that aren't meant, and for ticks that aren't in a loop: others run the same.
        """
        if "ticks" in "/".join([*scopes, own]).split("/") and not any(s.endswith("ticks/while") for s in scopes):
            return None
        actions = [scope for scope in scopes if _action(scope)]
        named = (i for i, scope in enumerate(actions) if self.layer in scope.split("/"))
        depth = self.depth if self.layer is None else 1 + next(named, len(actions))
        if len(actions) >= depth:
            return _SCOPES[_action(actions[-1])], self.turns ** (len(actions) - depth)
        if self.layer and len(actions) > 1:
            return None
        if self.ends and _action(own):
            return _SCOPES[_action(own)], 1
        return ("micro-batch" if scopes else "step"), 1

    def sent(self, text: str) -> Counts:
        """What a compiled program sends, but along `stage`."""
        found: Counts = Counter()
        for collective in read(text):
            over = axes_of(collective, self.mesh)
            place = self.place(collective.scopes, collective.op_name)
            if place and over and over != ("stage",):
                found[_as_sent(collective, place[0])] += place[1]
        return found

    def waits(self, text: str, network: Network) -> dict[str, float]:
        """By place, the seconds each time that it is run once in which a chip waits for what it sends."""
        found, loops = dict.fromkeys(PLACES, 0.0), read_loops(text)
        over = {collective.name: collective for collective in read(text)}
        all_take = transfer_seconds(loops, network, self.mesh)
        takes = {name: n for name, n in all_take.items() if axes_of(over[name], self.mesh) != ("stage",)}
        for loop in loops.walk():
            for one in turn_in_time(loop, takes, network.chip)[1]:
                place = self.place(over[one.name].scopes, over[one.name].op_name)
                if place:
                    found[place[0]] += place[1] * one.waited
        return found

    def cycles(self, text: str) -> dict[str, float]:
        """By place, the TPU compiler's estimate each time that it is run once, without what it waits for transfers."""
        found = dict.fromkeys(PLACES, 0.0)

        def visit(loop: Loop, scopes: tuple[str, ...]) -> None:
            place = self.place(scopes, "")
            if place:
                found[place[0]] += place[1] * loop.own
            for inner in loop.inner:
                visit(inner, (*scopes, inner.scope))

        visit(read_loops(text), ())
        return found


def _action(scope: str) -> str:
    """The last of "F" and "B" among the parts of a scope; empty without one. Of joined operations, B."""
    parts = [part for part in scope.replace("(", "/").replace(":", "/").split("/") if part in _SCOPES]
    return max(parts, key="FB".index, default="")


def _as_sent(collective: Collective, place: str) -> Sent:
    types = ", ".join(f"{n} x {kind}" if n > 1 else kind for kind, n in Counter(collective.types).items())
    return Sent(place, collective.kind, types, collective.bytes, moved(collective), collective.beside_work)


def moved(collective: Collective) -> float:
    """The bytes that a device sends."""
    p = max(len(group) for group in collective.groups)
    if collective.kind == "collective-permute":
        return collective.bytes
    share = (p - 1) / p
    return collective.bytes * share * (2 if collective.kind == "all-reduce" else 1)


def total(counts: Counts, place: str, choose: Callable[[Sent], bool] = lambda sent: True) -> float:
    """Bytes that are sent in a place, each time that it is run once."""
    return sum(sent.moved * count for sent, count in counts.items() if sent.place == place and choose(sent))


def per_step(counts: Counts, blocks: int, microbatches: int) -> float:
    """Bytes that a device sends in a step with so many blocks."""
    layers = total(counts, "forward") + total(counts, "backward")
    return microbatches * (blocks * layers + total(counts, "micro-batch")) + total(counts, "step")
