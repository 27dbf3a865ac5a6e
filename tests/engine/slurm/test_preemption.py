"""Promise 3 on a real cluster: a job that is preempted, or fails, is started again and ends as if it had not been."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import CHECKOUT, Finished, runs_in
from tests.engine.failures.pace import FAILS_ONCE, PACE_TARGET
from tests.engine.slurm import jobs
from tests.engine.slurm.cluster import Cluster
from tests.engine.slurm.jobs import SLURM, Job, submit, with_site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]

STEPS = 80
RUN = (
    *(*jobs.RUN, "trainer.accelerator=cpu", "global_batch_size=24", f"trainer.max_steps={STEPS}"),
    *("trainer.val_check_interval=7", "trainer.log_every_n_steps=1", "callbacks.last_checkpoint.every_n_steps=5"),
)
PACE = (PACE_TARGET, "callbacks.pace.seconds=0.5", "callbacks.pace.until=preempted")
NOTICE = ("callbacks.asks._target_=tests.engine.failures.pace.Asks", "callbacks.asks.when=on_fit_start")
NOTICE += ("callbacks.asks.by=SIGUSR1",)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("uninterrupted"))(*RUN, "strategy=single")


def test_jobs_that_slurm_preempts_go_on_and_one_that_its_user_cancels_does_not(
    slurm_cluster: Cluster, checkout: Path, uninterrupted: Finished, python: Path
) -> None:
    contained = checkout / "contained"  # in a container, where there is no scontrol: the job script hands the job back
    contained.mkdir()
    for name in ("train.py", "conf"):
        (contained / name).symlink_to(CHECKOUT / name)
    with_site(contained, f"python=(env PATH=/nowhere {python})\n")
    run = (SLURM / "multinode.sh", *RUN, *PACE)
    preempted = {
        folder: submit(slurm_cluster, *run, cwd=folder, nodes=1, ntasks=1, nodelist=node)
        for folder, node in ((checkout, "node1"), (contained, "node2"))
    }
    slowly = (*run, "callbacks.pace.seconds=3")
    cancelled = submit(slurm_cluster, *slowly, cwd=checkout, nodes=1, ntasks=1, nodelist="node3")
    for folder, job in preempted.items():
        wait_until_training(folder, job)
    urgent = ("sbatch", "--partition=urgent", "--exclusive", "--nodelist=node1,node2", "--nodes=2", "--wrap=true")
    assert slurm_cluster.run(*urgent, cwd=checkout).returncode == 0
    wait_until_training(checkout, cancelled)
    slurm_cluster.run("scancel", cancelled.id)
    for folder, job in preempted.items():
        job.until(lambda job=job: "stopped    by SIGTERM" in job.output())
        (folder / "preempted").touch()
        assert job.wait() == "COMPLETED", job.output()
        assert "failed with exit code" not in job.output()
        assert ("requeued   job" in job.output()) == (folder == checkout)
        is_whole(folder, job, uninterrupted)
    assert (cancelled.details()["JobState"], cancelled.details()["Restarts"]) == ("CANCELLED", "0")


@pytest.mark.nightly
def test_a_job_that_fails_is_started_again_and_goes_on(
    slurm_cluster: Cluster, read_only: Path, tmp_path: Path, uninterrupted: Finished
) -> None:
    """Of a checkout that nobody may write, and submitted in another folder."""
    run = (*RUN, FAILS_ONCE, "callbacks.fails.step=23")
    job = submit(slurm_cluster, read_only / "slurm/single.sh", *run, cwd=tmp_path, gpus_per_node=0)
    assert job.wait() == "COMPLETED", job.output()
    assert "failed with exit code 1, time 1 of at most 3: requeued" in job.output()
    assert job.log() == tmp_path / f"runs/slurm-{job.id}.out"
    assert {path.name for path in tmp_path.glob("runs/*")} == {"plain", job.log().name}
    assert (tmp_path / "runs/plain" / job.id / job.log().name).samefile(job.log())
    is_whole(tmp_path, job, uninterrupted)


def test_a_job_whose_notice_comes_before_it_trains_is_not_started_without_end(
    slurm_cluster: Cluster, checkout: Path
) -> None:
    with_site(checkout, "max_failures=0\n")
    job = submit(slurm_cluster, SLURM / "single.sh", *RUN, *NOTICE, cwd=checkout, gpus_per_node=0)
    assert (job.wait(), job.details()["Restarts"]) == ("FAILED", "0"), job.output()
    assert "SIGUSR1 came before a step was trained; if its time limit was near, ask for more --time" in job.output()
    assert "failed 1 times: not started again" in job.output()


def test_a_mistake_is_not_made_again(slurm_cluster: Cluster, checkout: Path) -> None:
    job = submit(slurm_cluster, SLURM / "multinode.sh", "seeed=1", cwd=checkout, nodes=1, ntasks=1)
    assert job.wait() == "FAILED"
    assert job.details()["Restarts"] == "0"
    assert "seeed: there is no such key. Did you mean seed?" in job.output()


def is_whole(checkout: Path, job: Job, uninterrupted: Finished) -> None:
    run = run_of(checkout, job)
    for metric in ("train/loss", "val/loss", "samples", "test/loss"):
        assert run.column(metric) == uninterrupted.column(metric), (metric, job.output())


def run_of(checkout: Path, job: Job) -> Finished:
    return Finished(0, job.output(), "", checkout, job.id)


def wait_until_training(checkout: Path, job: Job) -> None:
    job.until((checkout / "runs/plain" / job.id / "metrics.csv").exists)
