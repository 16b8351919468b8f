"""A process that runs google-tunix, for tests that name a helper."""

import importlib.util

import pytest

from timed import Worker


@pytest.fixture(scope="module")
def call(request):
    """`call("check", 3)`: the result of `check(3)` of the helper that the test file names, in a process of its own."""
    if importlib.util.find_spec("tunix") is None:
        pytest.skip("google-tunix isn't installed: pip install -e '.[llama]'")
    with Worker(limit=600) as worker:  # a collective that waits for a device of another stage would wait for ever
        yield lambda function, *arguments: worker.value(request.module.HELPER, function, *arguments)
