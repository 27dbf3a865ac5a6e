"""Promise 3 on a real cluster: a job that is preempted, or fails, is started again and ends as if it had not been."""

from __future__ import annotations

import random
import time
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
SLOWLY = (PACE_TARGET, "callbacks.pace.seconds=0.2")

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
    mistaken = submit(
        slurm_cluster, SLURM / "multinode.sh", "seeed=1", cwd=checkout, nodes=1, ntasks=1, nodelist="node4"
    )
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
    assert (mistaken.wait(), mistaken.details()["Restarts"]) == ("FAILED", "0")
    assert "seeed: there is no such key. Did you mean seed?" in mistaken.output()


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
    is_whole(tmp_path, job, uninterrupted)


@pytest.mark.nightly
def test_a_job_whose_notice_comes_before_it_trains_is_not_started_without_end(
    slurm_cluster: Cluster, checkout: Path
) -> None:
    with_site(checkout, "max_failures=0\n")
    job = submit(slurm_cluster, SLURM / "single.sh", *RUN, *NOTICE, cwd=checkout, gpus_per_node=0)
    assert (job.wait(), job.details()["Restarts"]) == ("FAILED", "0"), job.output()
    assert "SIGUSR1 came before a step was trained; if its time limit was near, ask for more --time" in job.output()
    assert "failed 1 times: not started again" in job.output()


@pytest.mark.nightly
def test_a_notice_that_another_rank_hears_before_it_trains_requeues_the_job(
    slurm_cluster: Cluster, checkout: Path, uninterrupted: Finished
) -> None:
    words = (*RUN, *NOTICE, "callbacks.asks.rank=1", "strategy=ddp")
    job = submit(slurm_cluster, SLURM / "multinode.sh", *words, cwd=checkout, nodes=1, ntasks=2)
    assert job.wait() == "COMPLETED", job.output()
    assert job.output().count("failed with exit code 143, time 1 of at most 3: requeued") == 1
    assert job.details()["Restarts"] == "1"
    losses = run_of(checkout, job).column("train/loss")
    assert losses == pytest.approx(uninterrupted.column("train/loss"), abs=1e-5)


@pytest.mark.nightly
def test_jobs_that_are_preempted_twenty_times_end_as_if_they_were_not(
    slurm_cluster: Cluster, checkout: Path, uninterrupted: Finished
) -> None:
    with_site(checkout, "max_failures=20\n")  # as many notices may come before a step is trained on a busy machine
    moment = random.Random(0)
    jobs = [
        submit(slurm_cluster, SLURM / "multinode.sh", *RUN, *SLOWLY, cwd=checkout, nodes=1, ntasks=1) for _ in range(4)
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


@pytest.mark.nightly
def test_jobs_that_meet_their_time_limit_go_on(slurm_cluster: Cluster, checkout: Path, uninterrupted: Finished) -> None:
    # Slurm looks twice a minute: notice comes after 89 to 119 seconds, of which a busy machine starts for some
    options = {"ntasks_per_node": 1, "time": 2, "signal": "SIGUSR1@1"}
    run = [*RUN, *SLOWLY, "callbacks.pace.seconds=2.5", f"trainer.max_steps={STEPS // 2}", "strategy=ddp"]
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


@pytest.mark.nightly
def test_where_failures_can_not_be_written_down_all_starts_are_counted(slurm_cluster: Cluster, tmp_path: Path) -> None:
    with_site(tmp_path, 'max_failures=1\nsrun() { mkdir -p "$failures" && return 3; }\n')
    job = submit(slurm_cluster, SLURM / "single.sh", cwd=tmp_path, gpus_per_node=0)
    assert (job.wait(), job.details()["Restarts"]) == ("FAILED", "1")
    told = [line for line in job.output().splitlines() if line.startswith("failed")]
    assert told == ["failed with exit code 3, time 1 of at most 1: requeued", "failed 2 times: not started again"]


@pytest.mark.nightly
def test_ctrl_c_ends_a_job(slurm_cluster: Cluster, checkout: Path) -> None:
    job = submit(slurm_cluster, SLURM / "multinode.sh", *RUN, *SLOWLY, cwd=checkout, nodes=1, ntasks=1)
    wait_until_training(checkout, job)
    slurm_cluster.run("scancel", "--signal=INT", job.id)
    assert job.wait() == "FAILED", job.output()
    assert (job.details()["ExitCode"], job.details()["Restarts"]) == ("130:0", "0")


def is_whole(checkout: Path, job: Job, uninterrupted: Finished) -> None:
    run = run_of(checkout, job)
    for metric in ("train/loss", "val/loss", "samples", "test/loss"):
        assert run.column(metric) == uninterrupted.column(metric), (metric, job.output())


def run_of(checkout: Path, job: Job) -> Finished:
    return Finished(0, job.output(), "", checkout, job.id)


def wait_until_training(checkout: Path, job: Job) -> None:
    job.until((checkout / "runs/plain" / job.id / "metrics.csv").exists)
