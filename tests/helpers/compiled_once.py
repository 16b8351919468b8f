"""Has XLA compile a program once in a session: each test makes its pipelines anew, many of them those of another test.

JAX forgets a program with the function that it was traced from. A quarter of XLA's seconds went into programs that it
had compiled before, to the letter: with the same lines of source, options and devices.
"""

import ctypes
import gc
import hashlib
import inspect
import resource
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax
from jax._src import compiler

KEPT = 500
"""Programs. Most are wanted again by a test of the same file."""
MOST_MEMORY = 9 * 2**28
"""Bytes that a process may hold after a test; if it holds more, what was compiled is forgotten."""
TAKES = ["backend", "module", "executable_devices", "options", "host_callbacks"]


kept: OrderedDict[Any, Any] = OrderedDict()


def make_room() -> None:
    """Forgets what was compiled, by JAX too, if this process has become large."""
    resident = Path("/proc/self/statm")
    if resident.exists() and int(resident.read_text().split()[1]) * resource.getpagesize() > MOST_MEMORY:
        kept.clear()
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what it was given back


def install() -> None:
    """From here on; a JAX that compiles by a function of other parameters compiles everything anew."""
    compile_anew = getattr(compiler, "backend_compile_and_load", None)
    if compile_anew is None or list(inspect.signature(compile_anew).parameters) != TAKES:
        return

    def compile_once(backend: Any, module: Any, executable_devices: Any, options: Any, host_callbacks: Any) -> Any:
        if host_callbacks:  # which are the caller's own
            return compile_anew(backend, module, executable_devices, options, host_callbacks)
        text = module.operation.get_asm(binary=True) + options.SerializeAsString()
        key = executable_devices, hashlib.sha256(text).digest()
        if key not in kept:
            kept[key] = compile_anew(backend, module, executable_devices, options, host_callbacks)
        kept.move_to_end(key)
        if len(kept) > KEPT:
            kept.popitem(last=False)
        return kept[key]

    compiler.backend_compile_and_load = compile_once
