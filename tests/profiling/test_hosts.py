"""Which process is slow, from times that are known; how they are gathered is in `test_processes.py`."""

import socket
from types import SimpleNamespace

import numpy as np
import pytest

from jpipe.profiling.findings import _slow_process
from jpipe.profiling.hosts import ProcessTime, host_names, process_times
from jpipe.profiling.profile import process_table


def mesh_of(processes):
    """A mesh of stages and data on devices of these processes, `[data, K]`."""
    devices = np.vectorize(lambda process: SimpleNamespace(process_index=process), otypes=[object])(processes)
    return SimpleNamespace(devices=devices, axis_names=("data", "stage"))


def test_one_process_has_nobody_to_be_compared_with(make_mesh):
    assert host_names() == [socket.gethostname()]
    assert process_times((0.5,), host_names(), make_mesh((2,))) == ()


def test_each_process_with_its_stages_over_the_median():
    mesh = mesh_of([[0, 0, 1, 1], [2, 2, 1, 1]])
    found = process_times((0.2, 0.5, 0.1, 0.2), ("a", "b", "c", "d"), mesh)
    assert [own.stages for own in found] == [(0, 1), (2, 3), (0, 1), ()]
    assert [own.of_median for own in found] == pytest.approx([1.0, 2.5, 0.5, 1.0])
    table = process_table(found)
    assert table.rows[1] == ("1", "b", "2, 3", "500", "2.50")
    assert table.marks == {1: "slowest"}
    assert [finding.text for finding in _slow_process(found)] == [
        "process 1 on b (stages 2, 3) takes 2.50 times the median of the processes for the same layers, and every step "
        "waits for it: see what else runs on that machine, or run without it"
    ]


def test_of_two_the_slow_one_is_over_the_fast_one():
    assert [own.of_median for own in process_times((0.1, 0.3), ("a", "b"), mesh_of([[0, 1]]))] == pytest.approx([1, 3])


def test_processes_that_are_alike_are_no_finding():
    alike = [ProcessTime(p, "a", (p,), seconds, seconds) for p, seconds in enumerate((1.0, 1.01, 1.015))]
    assert process_table(alike).marks == {}
    assert list(_slow_process(alike)) == list(_slow_process(())) == []
