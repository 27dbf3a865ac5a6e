"""The doctor on the nodes of a cluster names two that do not reach each other."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.slurm.cluster import SUBNET, Cluster

pytestmark = pytest.mark.slurm


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
    srun = ("srun", "--nodes=3", "--nodelist=node[1-3]", "--ntasks-per-node=1", "--cpus-per-task=1")
    done = slurm_cluster.run(*srun, "python", "-m", "lightswitch.doctor", cwd=tmp_path)
    assert done.returncode == 1
    named = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("node")]
    assert named == ["node1", "node2", "node3"]
    assert "node2 → node3: No route to host; check routes and firewalls between the two" in done.stdout
    assert "node1 →" not in done.stdout
    assert "all-reduce" not in done.stdout
