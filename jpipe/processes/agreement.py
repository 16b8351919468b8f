"""Checks that all processes want the same before they compute, or they would wait for one another for ever.

They exchange words through the key-value store of `jax.distributed`, which runs beside the devices, so that waiting
has an end and nothing is compiled.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence

import jax

from jpipe.seam.runtime import shared_store, wait_for

SECONDS = 300.0
"""How long a process waits for the others at its first step."""
_SHOWN = 3
_turns: dict[tuple[int, ...], itertools.count] = {}


def check_agreement(facts: Mapping[str, str], processes: Sequence[int]) -> None:
    """Checks that all processes hold the same facts; they all have to call it, in the same order.

    Args:
      facts: what a step depends on, by name.
      processes: the indices of the processes that compute together, this one among them.

    Raises:
      ValueError: in all of them, naming what differs and its values.
      RuntimeError: a process didn't come within `SECONDS`.
    """
    client, own = shared_store(), jax.process_index()
    if client is None or len(processes) < 2:  # without a service there is nobody to ask
        return
    turn = next(_turns.setdefault(tuple(processes), itertools.count()))
    place, first = f"jpipe/agreement/{','.join(map(str, processes))}/{turn}", min(processes)
    if own == first:
        verdict = _verdict(client, place, processes, dict(facts))
        client.key_value_set(f"{place}/verdict", json.dumps(verdict))
    else:
        client.key_value_set(f"{place}/{own}", json.dumps(dict(facts)))
        # A little longer, so that the first says who is missing.
        answer = wait_for(client, f"{place}/verdict", SECONDS + 5)
        verdict = ["late", _late([first])] if answer is None else json.loads(answer)
    kind, message = verdict
    if message:
        raise (RuntimeError if kind == "late" else ValueError)(message)


def _verdict(client, place: str, processes: Sequence[int], own: dict[str, str]) -> list[str]:
    """The first process' verdict: "differ" or "late", and a message; an empty one if all agree."""
    first, *others = sorted(processes)
    deadline = time.monotonic() + SECONDS
    answers = {p: wait_for(client, f"{place}/{p}", deadline - time.monotonic()) for p in others}
    missing = [p for p, answer in answers.items() if answer is None]
    if missing:
        return ["late", _late(missing)]
    told = {first: own} | {p: json.loads(answer or "{}") for p, answer in answers.items()}
    for p in others:
        client.key_value_delete(f"{place}/{p}")
    return ["differ", differences(told)]


def differences(told: Mapping[int, Mapping[str, str]]) -> str:
    """The differences between the facts of some processes, as a message; empty if there are none.

    >>> print(differences({0: {"num_stages": "2", "remat": "layer"}, 1: {"num_stages": "4", "remat": "layer"}}))
    the processes disagree on num_stages: 2 in process 0, 4 in process 1; give all processes the same arguments
    """
    found = []
    for name in dict.fromkeys(name for facts in told.values() for name in facts):
        values: dict[str, list[int]] = {}
        for process, facts in told.items():
            values.setdefault(facts.get(name, "nothing"), []).append(process)
        if len(values) > 1:
            whose = (f"{value} in process {', '.join(map(str, ps))}" for value, ps in values.items())
            found.append(f"{name}: {', '.join(whose)}")
    if not found:
        return ""
    more = f" (and {len(found) - _SHOWN} more)" if len(found) > _SHOWN else ""
    return f"the processes disagree on {'; '.join(found[:_SHOWN])}{more}; give all processes the same arguments"


def _late(missing: Sequence[int]) -> str:
    return (
        f"process {', '.join(map(str, missing))} did not come to the same step within {SECONDS:g} s; all processes "
        "have to make the same pipelines and take the same steps, in the same order"
    )
