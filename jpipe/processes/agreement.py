"""Compares facts of all processes, given by name, before they compute: else they wait for one another for ever.

They exchange texts through the key-value store of `jax.distributed`, which runs beside the devices, so that a process
waits only for some time, and nothing is compiled.
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
      facts: the settings that a step depends on, by name.
      processes: the indices of the processes that compute together, this one among them.

    Raises:
      ValueError: in all processes, naming the settings that differ and their values.
      RuntimeError: a process didn't come within `SECONDS`.
    """
    store, process = shared_store(), jax.process_index()
    if store is None or len(processes) < 2:  # without a service there is nobody to ask
        return
    turn = next(_turns.setdefault(tuple(processes), itertools.count()))
    folder, first = f"jpipe/agreement/{','.join(map(str, processes))}/{turn}", min(processes)
    if process == first:
        verdict = _verdict(store, folder, processes, dict(facts))
        store.key_value_set(f"{folder}/verdict", json.dumps(verdict))
    else:
        store.key_value_set(f"{folder}/{process}", json.dumps(dict(facts)))
        # The others wait a little longer, so that the first process says who is missing.
        answer = wait_for(store, f"{folder}/verdict", SECONDS + 5)
        verdict = ["late", _late([first])] if answer is None else json.loads(answer)
    kind, message = verdict
    if message:
        raise (RuntimeError if kind == "late" else ValueError)(message)


def _verdict(store, folder: str, processes: Sequence[int], facts: dict[str, str]) -> list[str]:
    """The first process' verdict, from its facts and those of the others, which it waits for.

    Returns:
      `[kind, message]`: "differ" or "late", and a message, which is empty if all agree.
    """
    first, *others = sorted(processes)
    deadline = time.monotonic() + SECONDS
    answers = {p: wait_for(store, f"{folder}/{p}", deadline - time.monotonic()) for p in others}
    if missing := [p for p, answer in answers.items() if answer is None]:
        return ["late", _late(missing)]
    for p in others:
        store.key_value_delete(f"{folder}/{p}")
    return ["differ", differences({first: facts} | {p: json.loads(answer or "{}") for p, answer in answers.items()})]


def differences(facts_of: Mapping[int, Mapping[str, str]]) -> str:
    """The differences between the facts of some processes, as a message; empty if there are none.

    >>> print(differences({0: {"num_stages": "2", "remat": "layer"}, 1: {"num_stages": "4", "remat": "layer"}}))
    the processes disagree on num_stages: 2 in process 0, 4 in process 1; give all processes the same arguments
    """
    lines = []
    for name in dict.fromkeys(name for facts in facts_of.values() for name in facts):
        values: dict[str, list[int]] = {}
        for process, facts in facts_of.items():
            values.setdefault(facts.get(name, "nothing"), []).append(process)
        if len(values) > 1:
            whose = (f"{value} in process {', '.join(map(str, ps))}" for value, ps in values.items())
            lines.append(f"{name}: {', '.join(whose)}")
    more = f" (and {len(lines) - _SHOWN} more)" if len(lines) > _SHOWN else ""
    message = f"the processes disagree on {'; '.join(lines[:_SHOWN])}{more}; give all processes the same arguments"
    return message if lines else ""


def _late(missing: Sequence[int]) -> str:
    """The message that names the processes that didn't come."""
    return (
        f"process {', '.join(map(str, missing))} did not come to the same step within {SECONDS:g} s; all processes "
        "have to make the same pipelines and take the same steps, in the same order"
    )
