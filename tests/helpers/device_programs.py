"""Which of its two programs a case of a large table runs: the one for CPUs, or the one for TPUs and GPUs.

They compute gradients of weights otherwise (`jpipe.model.weight_products`), and a mesh of simulated devices would
never run the second. Half of all cases run each. Which one follows from a case's words, so that a new case changes
nothing for the others.
"""

import contextlib
import zlib
from unittest import mock

from jpipe.mesh.splits import Splits


def is_for_accelerators(case: str) -> bool:
    """Whether a case runs the program for TPUs and GPUs."""
    return zlib.crc32(case.encode()) % 2 == 1


def programs_of(case: str) -> contextlib.AbstractContextManager[object]:
    """The context in which pipelines are traced for the devices of a case."""
    return mock.patch.object(Splits, "on_cpu", False) if is_for_accelerators(case) else contextlib.nullcontext()
