"""What tests of programs for GPUs share."""

import importlib.util

import pytest

needs_gpu_compiler = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)),
    reason="the GPU compiler isn't installed: pip install 'jax[cuda12-local]'",
)
"""The `test` extra, which `make test` installs, has the compiler where there is one: for Linux on x86-64."""
