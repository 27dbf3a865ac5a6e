"""`sbatch slurm/multinode.sh` trains over the nodes that it is given."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import CHECKOUT, PLAIN, Finished, runs_in
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import submit

pytestmark = pytest.mark.slurm

SCRIPT = CHECKOUT / "slurm/multinode.sh"
RUN = (
    *PLAIN,
    "name=plain",
    "global_batch_size=24",
    "trainer.max_steps=20",
    "trainer.val_check_interval=10",
    "trainer.log_every_n_steps=1",
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The checkout seen from a folder of the test's own, so that its runs stay there."""
    for name in ("train.py", "conf"):
        (tmp_path / name).symlink_to(CHECKOUT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("alone"))(*RUN, "strategy=single")


@pytest.mark.parametrize(("nodes", "tasks_per_node"), [(4, 1), (2, 2)])
def test_nodes_train_the_run_of_one_process(
    nodes: int, tasks_per_node: int, slurm_cluster: Cluster, checkout: Path, alone: Finished
) -> None:
    job = submit(
        slurm_cluster,
        SCRIPT,
        *RUN,
        "strategy=ddp",
        cwd=checkout,
        nodes=nodes,
        ntasks_per_node=tasks_per_node,
    )
    assert job.wait() == "COMPLETED", job.output()

    spread = Finished(0, job.output(), "", checkout)
    assert spread.run_dir == checkout / "runs/plain" / job.id
    for metric in ("train/loss", "val/loss", "test/accuracy"):
        expected, found = alone.column(metric), spread.column(metric)
        assert expected
        assert found == pytest.approx(expected, abs=1e-5), metric


def test_a_rank_that_dies_before_it_trains_ends_the_job(slurm_cluster: Cluster, checkout: Path) -> None:
    job = submit(slurm_cluster, SCRIPT, *RUN, "strategy=ddp", cwd=checkout, nodes=2, ntasks_per_node=1)
    _train_process(slurm_cluster, "node2").kill()
    killed_at = time.monotonic()
    assert job.wait(timeout_seconds=60) == "FAILED"
    assert time.monotonic() - killed_at < 20
    assert "Killed" in job.output()
    assert not list(checkout.glob("runs/*/*/metrics.csv")), "it trained before it died"


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({}, "2 nodes, 4 tasks, GPUs 0,1, 4 threads"),
        ({"nodes": 4, "gpus_per_node": 1}, "4 nodes, 4 tasks, GPUs 0, 8 threads"),
        ({"nodes": 1, "ntasks_per_node": 4}, "1 nodes, 4 tasks, GPUs 0,1, 2 threads"),
        ({"ntasks": 6, "cpus_per_task": 1}, "2 nodes, 6 tasks, GPUs 0,1, 1 threads"),
        ({"ntasks": 2, "gpus_per_task": 1}, "2 nodes, 2 tasks, GPUs 0,1, 8 threads"),
    ],
)
def test_sbatch_options_decide(options: dict[str, int], given: str, slurm_cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""
from os import environ as e
world = f"{e['SLURM_STEP_NUM_NODES']} nodes, {e['SLURM_STEP_NUM_TASKS']} tasks"
print(f"{world}, GPUs {e['CUDA_VISIBLE_DEVICES']}, {e['OMP_NUM_THREADS']} threads")
""")
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm/site.sh").write_text("unset OMP_NUM_THREADS\n")  # the tests' own
    job = submit(slurm_cluster, SCRIPT, cwd=tmp_path, **options)
    assert job.wait() == "COMPLETED", job.output()
    assert set(job.output().splitlines()) == {given}


def test_a_folder_without_train_py_is_refused(slurm_cluster: Cluster, tmp_path: Path) -> None:
    job = submit(slurm_cluster, SCRIPT, cwd=tmp_path)
    assert job.wait() == "FAILED"
    assert job.output() == f"found no train.py in {tmp_path}; run sbatch in the checkout's folder\n"


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
