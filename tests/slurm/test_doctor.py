"""The doctor on the nodes of a cluster: it measures them, and names two that do not reach each other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import SUBNET, Cluster

pytestmark = pytest.mark.slurm

SRUN = ("srun", "--ntasks-per-node=1", "--cpus-per-task=1", "--overcommit")


def doctor(cluster: Cluster, folder: Path, nodes: int) -> subprocess.CompletedProcess[str]:
    named = f"--nodelist=node[1-{nodes}]"
    return cluster.run(*SRUN, f"--nodes={nodes}", named, sys.executable, "-m", "lightswitch.doctor", cwd=folder)


def test_nodes_are_measured_and_told_of_once(slurm_cluster: Cluster, tmp_path: Path) -> None:
    done = doctor(slurm_cluster, tmp_path, nodes=2)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("processes   2, which meet at node1:")
    assert [line.split()[0] for line in lines if line.startswith("node")] == ["node1", "node2"]
    assert "network     2 nodes, each of which reaches every other" in lines
    assert "all-reduce  gloo, 8 bytes:" in done.stdout
    assert lines[-1].strip() == "no problem was found"


@pytest.fixture
def wall(slurm_cluster: Cluster) -> Iterator[None]:
    """Between node2 and node3; each of them still reaches node1."""
    from_node2 = ["nsenter", f"--net=/proc/{slurm_cluster.first_pids['node2']}/ns/net", "ip", "route"]
    way = ["unreachable", f"{SUBNET}.3/32"]
    subprocess.run([*from_node2, "add", *way], check=True)
    yield
    subprocess.run([*from_node2, "del", *way], check=True)


@pytest.mark.usefixtures("wall")
def test_two_nodes_that_do_not_reach_each_other_are_named(slurm_cluster: Cluster, tmp_path: Path) -> None:
    done = doctor(slurm_cluster, tmp_path, nodes=3)
    assert done.returncode == 1
    assert "node2 → node3: No route to host; look at routes and firewalls between the two" in done.stdout
    assert "node1 →" not in done.stdout
    assert "all-reduce" not in done.stdout
