"""Chooses the residuals that go to the host while they wait (`offload=`, or a policy of `remat=` that offloads)."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jpipe.arrays.trees import bytes_of
from jpipe.jaxprs.rewriting import equations_in
from jpipe.memory.offload import Offload
from jpipe.model.remat import Remat, check_names
from jpipe.model.traced_layer import DeviceLayer, TracedLayer

Going = list[tuple[bool, ...]]
"""For each group as traced, whether each of its residuals goes."""


def residuals_that_go(
    offload: Offload,
    remat: Remat,
    trained: Sequence[TracedLayer],
    layers: Sequence[DeviceLayer],
    counts: Sequence[int],
) -> Going:
    """Chooses residuals by share of bytes: the largest first, as long as they are no more than the share.

    Those of the last layer stay. Its backward follows its forward at once, and all stages would have room for them.

    Args:
      offload: the shares.
      remat: whose policy may name others, which go too.
      trained: the groups as traced.
      layers: the same, as one device runs them.
      counts: how many layers each group has.

    Raises:
      ValueError: the policy offloads values by names that no layer has.
    """
    equations = (equation for layer in trained for equation in equations_in(layer.forward.jaxpr.eqns))
    check_names(remat.policy, {e.params["name"] for e in equations if e.primitive.name == "name"})
    goes = [list(layer.offloaded) for layer in trained]
    for share, wanted in (
        (offload.residuals, [[True] * len(layer.residuals) for layer in layers]),
        (offload.boundaries, [layer.are_inputs for layer in trained]),
    ):
        places = [(g, i) for g, of_group in enumerate(wanted[:-1]) for i, wants in enumerate(of_group) if wants]
        size_of = {(g, i): counts[g] * bytes_of(layers[g].residuals[i]) for g, i in places}
        room = share * sum(size_of.values())
        for g, i in sorted(places, key=lambda place: -bytes_of(layers[place[0]].residuals[place[1]])):
            if size_of[g, i] <= room:
                goes[g][i], room = True, room - size_of[g, i]
    return list(map(tuple, goes))
