"""Has XLA compile a program once in a session: each test makes its pipelines anew, many of them those of another test.

JAX forgets a program with the function that it was traced from. A quarter of XLA's seconds went into programs that it
had compiled before, to the letter: with the same lines of source, options and devices.
"""

import hashlib
import inspect
from collections import OrderedDict
from typing import Any

from jax._src import compiler

KEPT = 500
"""Programs. Most are wanted again by a test of the same file."""
TAKES = ["backend", "module", "executable_devices", "options", "host_callbacks"]


def install() -> None:
    """From here on; a JAX that compiles by a function of other parameters compiles everything anew."""
    compile_anew = getattr(compiler, "backend_compile_and_load", None)
    if compile_anew is None or list(inspect.signature(compile_anew).parameters) != TAKES:
        return
    kept: OrderedDict[Any, Any] = OrderedDict()

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
