"""Promise 3 on a real cluster: a job that is preempted, or fails, is started again and ends as if it had not been."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.engine.conftest import CHECKOUT, PLAIN, Finished, runs_in
from tests.engine.fault_tolerance.pace import FAILS_ONCE, PACE_TARGET
from tests.engine.slurm.cluster import Cluster
from tests.engine.slurm.jobs import Job, submit

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

SLURM = CHECKOUT / "slurm"
STEPS = 80
RUN = (
    *PLAIN,
    "name=plain",
    "logger=csv",
    "~callbacks.lr_monitor",  # which needs another
    "trainer.accelerator=cpu",
    "global_batch_size=24",
    f"trainer.max_steps={STEPS}",
    "trainer.val_check_interval=7",
    "trainer.log_every_n_steps=1",
    "callbacks.last_checkpoint.every_n_steps=5",
)
PACE = (PACE_TARGET, "callbacks.pace.seconds=0.05")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("uninterrupted"))(*RUN, "strategy=single")


def test_jobs_that_are_preempted_twenty_times_end_as_if_they_were_not(
    slurm_cluster: Cluster, checkout: Path, uninterrupted: Finished
) -> None:
    moment = random.Random(0)
    jobs = [
        submit(slurm_cluster, SLURM / "multinode.sh", *RUN, *PACE, cwd=checkout, nodes=1, ntasks=1) for _ in range(4)
    ]
    for _ in range(5):
        for job in jobs:
            _wait_until_running(job)
        due = {job: time.monotonic() + moment.uniform(0.0, 12.0) for job in jobs}
        for job in sorted(jobs, key=due.__getitem__):
            time.sleep(max(0.0, due[job] - time.monotonic()))
            slurm_cluster.run("scancel", "--signal=USR1", job.id)
    for job in jobs:
        assert job.wait(timeout_seconds=200) == "COMPLETED", job.output()
        _is_whole(checkout, job, uninterrupted)
    assert sum(int(job.details()["Restarts"]) for job in jobs) >= 10, "most came while a run could be preempted"


def test_jobs_that_meet_their_time_limit_go_on(slurm_cluster: Cluster, checkout: Path, uninterrupted: Finished) -> None:
    # Slurm looks twice a minute: notice comes after 89 to 119 seconds, of which a busy machine starts for some
    options = {"ntasks_per_node": 1, "time": 2, "signal": "SIGUSR1@1"}
    run = [*RUN, *PACE[:1], "callbacks.pace.seconds=2.5", f"trainer.max_steps={STEPS // 2}", "strategy=ddp"]
    scripts = {"multinode.sh": 2, "torchrun.sh": 1}
    jobs = [
        submit(slurm_cluster, SLURM / script, *run, cwd=checkout, nodes=nodes, **options)
        for script, nodes in scripts.items()
    ]
    for job in jobs:
        assert job.wait(timeout_seconds=400) == "COMPLETED", job.output()
        assert "stopped    by SIGUSR1" in job.output()
        assert int(job.details()["Restarts"]) >= 1
        losses, expected = (run.column("train/loss") for run in (_run_of(checkout, job), uninterrupted))
        assert losses == pytest.approx({step: expected[step] for step in range(STEPS // 2)}, abs=1e-5)


def test_jobs_that_slurm_preempts_are_not_counted_as_failed(
    slurm_cluster: Cluster, checkout: Path, uninterrupted: Finished, python: Path
) -> None:
    contained = checkout / "contained"  # in a container, where there is no scontrol: the job script hands the job back
    contained.mkdir()
    for name in ("train.py", "conf"):
        (contained / name).symlink_to(CHECKOUT / name)
    _with_site(contained, f"python=(env PATH=/nowhere {python})\n")
    run = (SLURM / "multinode.sh", *RUN, *PACE)
    jobs = {
        folder: submit(slurm_cluster, *run, cwd=folder, nodes=1, ntasks=1, nodelist=node)
        for folder, node in ((checkout, "node1"), (contained, "node2"))
    }
    for folder, job in jobs.items():
        _wait_until_training(folder, job)
    urgent = ("sbatch", "--partition=urgent", "--exclusive", "--nodelist=node1,node2", "--nodes=2", "--wrap=true")
    assert slurm_cluster.run(*urgent, cwd=checkout).returncode == 0
    for folder, job in jobs.items():
        assert job.wait() == "COMPLETED", job.output()
        assert "stopped    by SIGTERM" in job.output()
        assert "failed with exit code" not in job.output()
        assert ("requeued   job" in job.output()) == (folder == checkout)
        _is_whole(folder, job, uninterrupted)


def test_ctrl_c_ends_a_job(slurm_cluster: Cluster, checkout: Path) -> None:
    job = submit(slurm_cluster, SLURM / "multinode.sh", *RUN, *PACE, cwd=checkout, nodes=1, ntasks=1)
    _wait_until_training(checkout, job)
    slurm_cluster.run("scancel", "--signal=INT", job.id)
    assert job.wait() == "FAILED", job.output()
    assert (job.details()["ExitCode"], job.details()["Restarts"]) == ("130:0", "0")


def test_a_job_that_fails_is_started_again_and_goes_on(
    slurm_cluster: Cluster, checkout: Path, uninterrupted: Finished
) -> None:
    fails_at = (FAILS_ONCE, "callbacks.fails.step=23")
    job = submit(slurm_cluster, SLURM / "multinode.sh", *RUN, *fails_at, cwd=checkout, nodes=1, ntasks=1)
    assert job.wait() == "COMPLETED", job.output()
    assert "failed with exit code 1, time 1 of at most 3: requeued" in job.output()
    assert not list(checkout.glob("*.failures"))
    _is_whole(checkout, job, uninterrupted)


def test_a_job_that_fails_each_time_is_given_up(slurm_cluster: Cluster, checkout: Path) -> None:
    (checkout / "slurm").unlink()
    _with_site(checkout, "python=(false)\n")
    job = submit(slurm_cluster, SLURM / "multinode.sh", cwd=checkout, nodes=1, ntasks=1)
    assert job.wait() == "FAILED"
    assert "failed 4 times: not started again" in job.output()
    assert job.details()["Restarts"] == "3"


def test_a_mistake_is_not_made_again(slurm_cluster: Cluster, checkout: Path) -> None:
    job = submit(slurm_cluster, SLURM / "multinode.sh", "seeed=1", cwd=checkout, nodes=1, ntasks=1)
    assert job.wait() == "FAILED"
    assert job.details()["Restarts"] == "0"
    assert "seeed: there is no such key. Did you mean seed?" in job.output()


def test_a_job_that_its_user_cancels_is_not_started_again(slurm_cluster: Cluster, checkout: Path) -> None:
    job = submit(slurm_cluster, SLURM / "multinode.sh", *RUN, *PACE, cwd=checkout, nodes=1, ntasks=1)
    _wait_until_training(checkout, job)
    slurm_cluster.run("scancel", job.id)
    assert job.wait() == "CANCELLED"
    time.sleep(8)  # a requeued job would be pending, or running by now
    assert (job.details()["JobState"], job.details()["Restarts"]) == ("CANCELLED", "0")


def _with_site(checkout: Path, settings: str) -> None:
    (checkout / "slurm").mkdir()
    (checkout / "slurm/job.sh").symlink_to(SLURM / "job.sh")
    (checkout / "slurm/site.sh").write_text(settings)


def _is_whole(checkout: Path, job: Job, uninterrupted: Finished) -> None:
    run = _run_of(checkout, job)
    for metric in ("train/loss", "val/loss", "samples", "test/loss"):
        assert run.column(metric) == uninterrupted.column(metric), (metric, job.output())


def _run_of(checkout: Path, job: Job) -> Finished:
    return Finished(0, job.output(), "", checkout, job.id)


def _wait_until_running(job: Job) -> None:
    deadline = time.monotonic() + 120
    while (state := job.details()["JobState"]) not in ("RUNNING", "COMPLETED"):
        assert time.monotonic() < deadline, (state, job.output())
        time.sleep(0.2)


def _wait_until_training(checkout: Path, job: Job) -> None:
    deadline = time.monotonic() + 120
    while not (checkout / "runs/plain" / job.id / "metrics.csv").exists():
        assert time.monotonic() < deadline, job.output()
        time.sleep(0.2)
