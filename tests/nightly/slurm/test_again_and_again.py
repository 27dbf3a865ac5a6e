"""Jobs that are preempted, time out, are interrupted, cancelled or fail, again and again."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.engine.conftest import Finished
from tests.engine.failures.pace import PACE_TARGET
from tests.engine.slurm.cluster import Cluster
from tests.engine.slurm.jobs import SLURM, submit, with_site
from tests.engine.slurm.test_preemption import RUN, STEPS, is_whole, run_of, uninterrupted, wait_until_training

__all__ = ["uninterrupted"]  # a fixture
PACE = (PACE_TARGET, "callbacks.pace.seconds=0.2")
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]


def test_jobs_that_are_preempted_twenty_times_end_as_if_they_were_not(
    slurm_cluster: Cluster, checkout: Path, uninterrupted: Finished
) -> None:
    moment = random.Random(0)
    jobs = [
        submit(slurm_cluster, SLURM / "multinode.sh", *RUN, *PACE, cwd=checkout, nodes=1, ntasks=1) for _ in range(4)
    ]
    for _ in range(5):
        for job in jobs:
            job.until(lambda job=job: job.details()["JobState"] in ("RUNNING", "COMPLETED"))
        due = {job: time.monotonic() + moment.uniform(0.0, 12.0) for job in jobs}
        for job in sorted(jobs, key=due.__getitem__):
            time.sleep(max(0.0, due[job] - time.monotonic()))
            slurm_cluster.run("scancel", "--signal=USR1", job.id)
    for job in jobs:
        assert job.wait() == "COMPLETED", job.output()
        is_whole(checkout, job, uninterrupted)
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
        assert job.wait() == "COMPLETED", job.output()
        assert "stopped    by SIGUSR1" in job.output()
        assert int(job.details()["Restarts"]) >= 1
        losses, expected = (run.column("train/loss") for run in (run_of(checkout, job), uninterrupted))
        assert losses == pytest.approx({step: expected[step] for step in range(STEPS // 2)}, abs=1e-5)


def test_a_notice_that_another_rank_hears_before_it_trains_requeues_the_job(
    slurm_cluster: Cluster, checkout: Path, uninterrupted: Finished
) -> None:
    asks = ("callbacks.asks._target_=tests.engine.failures.pace.Asks", "callbacks.asks.when=on_fit_start")
    notice = (*asks, "callbacks.asks.rank=1", "callbacks.asks.by=SIGUSR1", "strategy=ddp")
    job = submit(slurm_cluster, SLURM / "multinode.sh", *RUN, *notice, cwd=checkout, nodes=1, ntasks=2)
    assert job.wait() == "COMPLETED", job.output()
    assert job.output().count("failed with exit code 143, time 1 of at most 3: requeued") == 1
    assert job.details()["Restarts"] == "1"
    losses = run_of(checkout, job).column("train/loss")
    assert losses == pytest.approx(uninterrupted.column("train/loss"), abs=1e-5)


def test_where_failures_can_not_be_written_down_all_starts_are_counted(slurm_cluster: Cluster, tmp_path: Path) -> None:
    with_site(tmp_path, 'max_failures=1\nsrun() { mkdir -p "$failures" && return 3; }\n')
    job = submit(slurm_cluster, SLURM / "single.sh", cwd=tmp_path, gpus_per_node=0)
    assert (job.wait(), job.details()["Restarts"]) == ("FAILED", "1")
    told = [line for line in job.output().splitlines() if line.startswith("failed")]
    assert told == ["failed with exit code 3, time 1 of at most 1: requeued", "failed 2 times: not started again"]


def test_ctrl_c_ends_a_job(slurm_cluster: Cluster, checkout: Path) -> None:
    job = submit(slurm_cluster, SLURM / "multinode.sh", *RUN, *PACE, cwd=checkout, nodes=1, ntasks=1)
    wait_until_training(checkout, job)
    slurm_cluster.run("scancel", "--signal=INT", job.id)
    assert job.wait() == "FAILED", job.output()
    assert (job.details()["ExitCode"], job.details()["Restarts"]) == ("130:0", "0")


def test_a_job_that_fails_each_time_is_given_up(slurm_cluster: Cluster, checkout: Path) -> None:
    with_site(checkout, "python=(false)\n")
    job = submit(slurm_cluster, SLURM / "multinode.sh", cwd=checkout, nodes=1, ntasks=1)
    assert job.wait() == "FAILED"
    assert "failed 4 times: not started again" in job.output()
    assert job.details()["Restarts"] == "3"
