"""`sbatch slurm/multinode.sh` trains over the nodes that it is given."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.engine.conftest import CHECKOUT, PLAIN, Finished, runs_in
from tests.engine.slurm.cluster import Cluster
from tests.engine.slurm.jobs import submit

pytestmark = pytest.mark.slurm

SLURM = CHECKOUT / "slurm"
RUN = (
    *PLAIN,
    "name=plain",
    "logger=csv",
    "~callbacks.lr_monitor",  # which needs another
    "global_batch_size=24",
    "trainer.max_steps=20",
    "trainer.val_check_interval=10",
    "trainer.log_every_n_steps=1",
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("alone"))(*RUN, "strategy=single")


@pytest.mark.parametrize(
    ("script", "strategy", "nodes", "tasks_per_node"),
    [
        ("multinode.sh", "ddp", 4, 1),  # how ranks are placed is the same for each strategy
        *(("multinode.sh", strategy, 2, 2) for strategy in ("ddp", "fsdp", "deepspeed_stage_2")),
        ("torchrun.sh", "fsdp", 2, 2),
    ],
)
def test_nodes_train_the_run_of_one_process(
    script: str,
    strategy: str,
    nodes: int,
    tasks_per_node: int,
    slurm_cluster: Cluster,
    checkout: Path,
    alone: Finished,
) -> None:
    options = {"nodes": nodes, "ntasks_per_node": tasks_per_node}
    job = submit(slurm_cluster, SLURM / script, *RUN, f"strategy={strategy}", cwd=checkout, **options)
    assert job.wait() == "COMPLETED", job.output()

    spread = Finished(0, job.output(), "", checkout)
    assert spread.run_dir == checkout / "runs/plain" / job.id
    assert "can't reach the watchdog" not in job.output()
    for metric in ("train/loss", "val/loss", "test/accuracy"):
        expected, found = alone.column(metric), spread.column(metric)
        assert expected
        assert found == pytest.approx(expected, abs=1e-5), metric


def test_a_rank_that_dies_before_it_trains_ends_the_job(slurm_cluster: Cluster, checkout: Path) -> None:
    options = {"nodes": 2, "ntasks_per_node": 1, "no_requeue": True}
    job = submit(slurm_cluster, SLURM / "multinode.sh", *RUN, "strategy=ddp", cwd=checkout, **options)
    _train_process(slurm_cluster, "node2").kill()
    killed_at = time.monotonic()
    assert job.wait(timeout_seconds=60) == "FAILED"
    assert time.monotonic() - killed_at < 20
    assert "Killed" in job.output()
    assert not list(checkout.glob("runs/*/*/metrics.csv")), "it trained before it died"


def test_a_folder_without_train_py_is_refused(slurm_cluster: Cluster, tmp_path: Path) -> None:
    job = submit(slurm_cluster, SLURM / "multinode.sh", cwd=tmp_path)
    assert job.wait() == "FAILED"
    assert job.output() == f"found no slurm/job.sh in {tmp_path}; run sbatch in the checkout's folder\n"


def _train_process(cluster: Cluster, node: str) -> psutil.Process:
    """The first process of train.py on a node, as soon as it is there."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for process in psutil.Process(cluster.first_pids[node]).children(recursive=True):
            try:
                if "train.py" in process.cmdline() and process.name().startswith("python"):
                    return process
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.02)
    raise TimeoutError(f"no train.py on {node}")
