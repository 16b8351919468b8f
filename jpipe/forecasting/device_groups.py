"""Reads which devices work together in a collective of a compiled program."""

from __future__ import annotations

import itertools
import re

import numpy as np
from jax.sharding import Mesh

Groups = tuple[tuple[int, ...], ...]
"""The devices that work together in a collective, by their places in the mesh; of a permute (source, target)."""


def axes_along(groups: Groups, mesh: Mesh) -> tuple[str, ...]:
    """The axes of a mesh along which the devices of a group differ."""
    places = [np.stack(np.unravel_index(list(group), mesh.devices.shape)) for group in groups]
    varies = [any(len(set(place[i])) > 1 for place in places) for i in range(len(mesh.axis_names))]
    return tuple(name for name, does in zip(mesh.axis_names, varies, strict=True) if does)


def groups_of(line: str) -> Groups:
    """The groups of devices, or pairs, that a collective names; empty if it means all.

    Raises:
      ValueError: they are written in another way.
    """
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\s*\d+\},?\s*)*)\}", line)
    listed = pairs or re.search(r"replica_groups=\{((?:\{[\d,\s]*\},?\s*)*)\}", line)
    if listed:
        return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,\s]*)\}", listed.group(1)))
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota:
        shape, sizes, order = (_numbers(part or "") for part in iota.groups())
        devices = np.arange(np.prod(sizes)).reshape(sizes)
        devices = devices.transpose(order) if order else devices
        return tuple(tuple(int(i) for i in group) for group in devices.reshape(shape))
    order = r"(?:, device_ids=\(([^()]*(?:\([\d,]*\))?)\))?"
    named = re.search(rf"replica_groups=mesh\[([^\]]*)\]{order} *\{{([^{{}}]*)\}}", line)
    if named:
        axes, order, over = named.groups()
        return _in_order(_groups_by_axes(axes, over), order)
    if "replica_groups=" in line or "source_target_pairs=" in line:
        raise ValueError(f"groups of devices written in an unknown way: {line.strip()[:300]}")
    return ()


def _in_order(groups: Groups, order: str | None) -> Groups:
    """Groups of places in a mesh as groups of devices.

    Args:
      groups: of places.
      order: the devices at these places, such as "[2,2]T(1,0)" or "0,2,1,3"; None if they are in order.

    >>> _in_order(((0, 1), (2, 3)), "[2,2]T(1,0)")
    ((0, 2), (1, 3))
    """
    if order is None:
        return groups
    iota = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", order.strip())
    if iota:
        sizes, axes = (_numbers(part or "") for part in iota.groups())
        devices = np.arange(np.prod(sizes, dtype=int)).reshape(sizes)
        devices = (devices.transpose(axes) if axes else devices).reshape(-1)
    else:
        devices = np.asarray(_numbers(order))
    return tuple(tuple(int(devices[i]) for i in group) for group in groups)


def _groups_by_axes(axes: str, over: str) -> Groups:
    """The groups over some axes of a mesh in the order of devices.

    Args:
      axes: names and sizes, such as "'a'=2,'b'=4".
      over: names, such as "'b'"; or parts of one, "'b':(2)2" the part of size 2 inside of the first 2.

    >>> _groups_by_axes("'a'=2,'b'=4", "'a','b':(2)2")
    ((0, 1, 4, 5), (2, 3, 6, 7))
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", axes)}
    parts = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", over)
    cuts = {name: {1, size} for name, size in sizes.items()}
    for name, before, size in parts:
        cuts[name] |= {int(before), int(before) * int(size)} if size else set()
    pieces = [(name, a, b) for name, ends in cuts.items() for a, b in itertools.pairwise(sorted(ends))]
    taken = [(name, int(before or 1), int(before or 1) * int(size or sizes[name])) for name, before, size in parts]
    inside = [any(name == n and a <= start and end <= b for n, a, b in taken) for name, start, end in pieces]
    shape = [end // start for _, start, end in pieces]
    order = sorted(range(len(pieces)), key=lambda i: inside[i])
    width = int(np.prod([size for size, is_in in zip(shape, inside, strict=True) if is_in]))
    devices = np.arange(np.prod(shape, dtype=int)).reshape(shape).transpose(order).reshape(-1, width)
    return tuple(tuple(int(i) for i in group) for group in devices)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
