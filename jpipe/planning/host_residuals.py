"""Chooses the residuals that go to the host while they wait (`offload=`, or a policy of `remat=` that offloads)."""

from __future__ import annotations

from collections.abc import Sequence

from jpipe.arrays.trees import bytes_of
from jpipe.jaxprs.tracing import equations_in
from jpipe.model.groups import Model
from jpipe.model.remat import check_names
from jpipe.model.traced_layer import DeviceLayer, TracedLayer
from jpipe.planning.request import Request

Going = list[tuple[bool, ...]]
"""For each group as traced, whether each of its residuals goes."""


def residuals_that_go(
    request: Request, traced: Model, trained: Sequence[TracedLayer], layers: Sequence[DeviceLayer]
) -> Going:
    """Chooses residuals by share of bytes: the largest first, as long as they are no more than the share.

    Those of the last layer stay. Its backward follows its forward at once, and all stages would have room for them.

    Args:
      request: with the shares of `offload=`, and a policy that may name others, which go too.
      traced: the layers.
      trained: its groups; empty if nothing is kept.
      layers: the same, as one device runs them.

    Raises:
      ValueError: the policy offloads values by names that no layer has.
    """
    if trained:
        equations = (equation for layer in trained for equation in equations_in(layer.forward.jaxpr.eqns))
        check_names(request.remat.policy, {e.params["name"] for e in equations if e.primitive.name == "name"})
    goes, offload = [list(layer.offloaded) for layer in trained], request.options.offload
    for share, wanted in (
        (offload.residuals, [[True] * len(layer.residuals) for layer in layers]),
        (offload.boundaries, [layer.are_inputs for layer in trained]),
    ):
        places = [(g, i) for g, of_group in enumerate(wanted[:-1]) for i, wants in enumerate(of_group) if wants]
        bytes_in = {(g, i): bytes_of(layers[g].residuals[i]) for g, i in places}
        room = share * sum(len(traced.groups[g].indices) * size for (g, _), size in bytes_in.items())
        for g, i in sorted(places, key=lambda place: -bytes_in[place]):
            room_left = room - len(traced.groups[g].indices) * bytes_in[g, i]
            if room_left >= 0:
                goes[g][i], room = True, room_left
    return list(map(tuple, goes))
