"""The test cluster is a real one, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from lightswitch.regular_files import remove_tree
from tests.engine.slurm.cluster import Cluster

pytestmark = pytest.mark.slurm


def test_two_clusters_do_not_meet_and_leave_nothing() -> None:
    networks_before = os.listdir("/sys/class/net")
    processes_before = _below(psutil.Process())
    with Cluster(nodes=1) as first, Cluster(nodes=2) as second:
        assert (first.idle_nodes(), second.idle_nodes()) == (2, 3)
        assert os.listdir("/sys/class/net") == networks_before
        roots = [first.root, second.root]
        started = {p: name for p, name in _below(psutil.Process()).items() if p not in processes_before}
    assert {"munged", "slurmctld", "slurmd"} <= set(started.values())
    assert not _alive(started)
    assert not any(root.exists() for root in roots)


def test_a_cluster_dies_with_the_process_that_started_it() -> None:
    start_and_hang = """
from lightswitch.regular_files import remove_tree
from tests.engine.slurm.cluster import Cluster
with Cluster(nodes=1) as cluster:
    print(cluster.root, flush=True)
    input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", start_and_hang], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        root = starter.stdout.readline().strip()
        assert root, "the cluster did not come up"
        started = _below(psutil.Process(starter.pid))
        starter.kill()
    remove_tree(Path(root))
    assert {"munged", "slurmctld", "slurmd"} <= set(started.values())
    assert not _alive(started)


def _below(parent: psutil.Process) -> dict[psutil.Process, str]:
    """The names of all processes below one."""
    names = {}
    for process in parent.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            names[process] = process.name()
    return names


def _alive(processes: Iterable[psutil.Process], timeout_seconds: float = 120) -> list[psutil.Process]:
    """Those that do not end in time; a zombie that waits for its new parent has ended."""
    deadline = time.monotonic() + timeout_seconds
    while (alive := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
