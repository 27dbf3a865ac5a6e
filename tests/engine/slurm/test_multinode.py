"""`sbatch slurm/multinode.sh` trains over the nodes that it is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import Finished, runs_in
from tests.engine.slurm import jobs
from tests.engine.slurm.cluster import Cluster
from tests.engine.slurm.jobs import SLURM, submit
from tests.night import at_night

pytestmark = pytest.mark.slurm

RUN = (*jobs.RUN, "global_batch_size=24", "trainer.max_steps=20", "trainer.val_check_interval=10")
RUN += ("trainer.log_every_n_steps=1",)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("alone"))(*RUN, "strategy=single")


@pytest.mark.parametrize(("script", "tasks_per_node"), [("multinode.sh", 1), *at_night(("torchrun.sh", 2))])
def test_nodes_train_the_run_of_one_process(
    script: str, tasks_per_node: int, slurm_cluster: Cluster, checkout: Path, alone: Finished
) -> None:
    """By the other script at night: tests/nightly/slurm/test_nodes.py."""
    trains_the_run(alone, script, "fsdp", 2, tasks_per_node, slurm_cluster, checkout)


@pytest.mark.nightly
def test_an_srun_with_another_number_of_tasks_on_each_node_trains_the_run_of_one_process(
    slurm_cluster: Cluster, checkout: Path, alone: Finished, python: Path
) -> None:
    typed = ("srun", "--nodes=2", "--ntasks=3", str(python), "train.py", *RUN, "strategy=fsdp")
    run = slurm_cluster.run(*typed, cwd=checkout)
    assert run.returncode == 0, run.stderr
    assert "precision 32-true, 3 CPU on 2 nodes\n" in run.stdout
    assert "go on      srun --nodes=2 --ntasks=3 python train.py " in run.stdout
    is_the_run(Finished(0, run.stdout, "", checkout), alone)


def trains_the_run(
    alone: Finished, script: str, strategy: str, nodes: int, tasks_per_node: int, cluster: Cluster, checkout: Path
) -> None:
    options = {"nodes": nodes, "ntasks_per_node": tasks_per_node}
    job = submit(cluster, SLURM / script, *RUN, f"strategy={strategy}", cwd=checkout, **options)
    assert job.wait() == "COMPLETED", job.output()

    spread = Finished(0, job.output(), "", checkout)
    assert spread.run_dir == checkout / "runs/plain" / job.id
    assert "can't reach the watchdog" not in job.output()
    is_the_run(spread, alone)


def is_the_run(spread: Finished, alone: Finished) -> None:
    for metric in ("train/loss", "val/loss", "test/accuracy"):
        expected, found = alone.column(metric), spread.column(metric)
        assert expected
        assert found == pytest.approx(expected, abs=1e-5), metric
