"""Nodes in other numbers and under other strategies, and a rank that dies at once."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.engine.conftest import Finished
from tests.engine.failures.pace import PACE_TARGET
from tests.engine.slurm.cluster import Cluster
from tests.engine.slurm.jobs import SLURM, submit
from tests.engine.slurm.test_multinode import RUN, alone, trains_the_run

__all__ = ["alone"]  # a fixture
pytestmark = pytest.mark.slurm


@pytest.mark.parametrize(
    ("strategy", "nodes", "tasks_per_node"),
    [("ddp", 4, 1), ("ddp", 2, 2), ("deepspeed_stage_2", 2, 2)],  # how ranks are placed is the same for each strategy
)
def test_nodes_train_the_run_of_one_process(
    strategy: str,
    nodes: int,
    tasks_per_node: int,
    slurm_cluster: Cluster,
    checkout: Path,
    alone: Finished,
) -> None:
    trains_the_run(alone, "multinode.sh", strategy, nodes, tasks_per_node, slurm_cluster, checkout)


def test_a_rank_that_dies_before_it_trains_ends_the_job(slurm_cluster: Cluster, checkout: Path) -> None:
    options = {"nodes": 2, "ntasks_per_node": 1, "no_requeue": True}
    # the other one would wait for an hour; and where it comes to train before it is killed, no step ends
    waits = ("meet_timeout_seconds=3600", PACE_TARGET, "callbacks.pace.seconds=3600")
    job = submit(slurm_cluster, SLURM / "multinode.sh", *RUN, *waits, "strategy=ddp", cwd=checkout, **options)
    _train_process(slurm_cluster, "node2").kill()
    assert job.wait() == "FAILED"
    assert "Killed" in job.output()
    assert not list(checkout.glob("runs/*/*/metrics.csv")), "it trained before it died"


def _train_process(cluster: Cluster, node: str) -> psutil.Process:
    """The first process of train.py on a node, as soon as it is there."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        for process in psutil.Process(cluster.first_pids[node]).children(recursive=True):
            try:
                if "train.py" in process.cmdline() and process.name().startswith("python"):
                    return process
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.02)
    raise TimeoutError(f"no train.py on {node}")
