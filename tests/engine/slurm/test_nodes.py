"""`sbatch slurm/multinode.sh` trains over the nodes that it is given, and goes on with the rest where one is lost."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.engine.conftest import Finished, runs_in
from tests.engine.failures.pace import PACE_TARGET
from tests.engine.slurm import jobs
from tests.engine.slurm.cluster import Cluster
from tests.engine.slurm.jobs import SLURM, Job, submit, with_site
from tests.night import at_night

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]

RUN = (*jobs.RUN, "trainer.accelerator=cpu", "global_batch_size=24", "trainer.log_every_n_steps=1")
RUN += ("trainer.val_check_interval=10", "callbacks.last_checkpoint.every_n_steps=5", "watch.lost_after_seconds=20")
SHORT, LONG = (*RUN, "trainer.max_steps=20"), (*RUN, "trainer.max_steps=60")
PACE = (PACE_TARGET, "callbacks.pace.seconds=1", "callbacks.pace.until=lost")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("alone"))(*SHORT, "strategy=single")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("undisturbed"))(*LONG, "strategy=single")


@pytest.mark.parametrize(
    ("script", "strategy", "nodes", "tasks_per_node"),
    [
        ("multinode.sh", "fsdp", 2, 1),
        *at_night(("torchrun.sh", "fsdp", 2, 2), ("multinode.sh", "ddp", 4, 1)),
        *at_night(("multinode.sh", "deepspeed_stage_2", 2, 2)),
    ],
)
def test_nodes_train_the_run_of_one_process(
    script: str, strategy: str, nodes: int, tasks_per_node: int, slurm_cluster: Cluster, checkout: Path, alone: Finished
) -> None:
    options = {"nodes": nodes, "ntasks_per_node": tasks_per_node}
    job = submit(slurm_cluster, SLURM / script, *SHORT, f"strategy={strategy}", cwd=checkout, **options)
    assert job.wait() == "COMPLETED", job.output()
    assert "can't reach the watchdog" not in job.output()
    is_the_run(job, checkout, alone)


@pytest.mark.nightly
def test_an_srun_without_a_job_script_trains_the_run_of_one_process(
    slurm_cluster: Cluster, checkout: Path, alone: Finished, python: Path
) -> None:
    typed = ("srun", "--nodes=2", "--ntasks-per-node=2", str(python), "train.py", *SHORT, "strategy=fsdp")
    run = slurm_cluster.run(*typed, cwd=checkout)
    assert run.returncode == 0, run.stderr
    assert "precision 32-true, 2 nodes × 2 CPU\n" in run.stdout
    assert "go on      srun --nodes=2 --ntasks-per-node=2 python train.py " in run.stdout
    (run_dir,) = checkout.glob("runs/plain/*/")
    is_the_run(Job(slurm_cluster, run_dir.name), checkout, alone)


def is_the_run(job: Job, checkout: Path, expected: Finished) -> None:
    run = Finished(0, "", "", checkout, job.id)
    for metric in ("train/loss", "val/loss", "test/loss"):
        assert run.column(metric) == pytest.approx(expected.column(metric), abs=1e-5), (metric, job.output())


# Nodes that are lost


@pytest.fixture
def four_nodes(slurm_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, whose four nodes are up again at the end."""
    yield slurm_cluster
    for node in slurm_cluster.nodes:
        if f"node{node}" not in slurm_cluster.processes:
            slurm_cluster.boot(node)


@pytest.mark.nightly
def test_a_job_that_lost_a_node_goes_on_with_the_rest(
    four_nodes: Cluster, checkout: Path, undisturbed: Finished
) -> None:
    options = {"nodes": "2-3", "gpus_per_node": 1, "exclude": "node4"}
    job = submit(four_nodes, SLURM / "multinode.sh", *LONG, *PACE, "strategy=ddp", cwd=checkout, **options)
    job.until(lambda: has_checkpoint(job, checkout))
    assert job.details()["NodeList"] == "node[1-3]"
    four_nodes.crash(3)
    (checkout / "lost").touch()
    assert job.wait() == "COMPLETED", job.output()
    assert job.details()["Restarts"] == "0"
    assert "lost       node3: continues with 2 of 3 nodes" in job.output()
    assert re.search(r"^world      3 nodes × 1 → 2 nodes × 1 at step \d+: lost node3$", job.output(), re.MULTILINE)
    is_the_run(job, checkout, undisturbed)


def has_checkpoint(job: Job, checkout: Path) -> bool:
    return any((checkout / "runs/plain" / job.id / "checkpoints").glob("*"))


# by name: a job's script, its nodes, of which node2 will be lost, and its strategy
JOBS = {
    "waits": ("multinode.sh", {"nodes": 2, "nodelist": "node[1-2]"}, ("strategy=ddp",)),  # for two, as its site says
    "refused": (
        *("multinode.sh", {"nodes": 2, "nodelist": "node[1-2]"}),
        ("strategy=fsdp_hybrid", "trainer.strategy.shard_size=2"),  # which can't train on one
    ),
    "torchrun": ("torchrun.sh", {"nodes": 2, "nodelist": "node[1-2]"}, ("strategy=ddp",)),
    "headless": (
        "multinode.sh",
        {"nodes": "1-2", "exclude": "node1,node4"},
        ("strategy=ddp",),
    ),  # node2 runs its script
}
WENT_ON = "lost       node2: continues with 1 of 2 nodes"


@pytest.mark.nightly
def test_what_becomes_of_runs_that_lose_a_node(four_nodes: Cluster, checkout: Path, undisturbed: Finished) -> None:
    with_site(checkout, "[[ $SLURM_JOB_NAME != waits ]] || min_nodes=2\n")
    submitted = {}
    for name, (script, options, strategy) in JOBS.items():
        own = {"job_name": name, "exclusive": "user", **options}
        submitted[name] = submit(four_nodes, SLURM / script, *LONG, *PACE, *strategy, cwd=checkout, **own)
    for job in submitted.values():
        job.until(lambda job=job: has_checkpoint(job, checkout))
    four_nodes.crash(2)
    for name in ("torchrun", "headless"):
        submitted[name].until(lambda name=name: "1 node × 1 at step" in submitted[name].output())
    submitted["refused"].until(lambda: WENT_ON in submitted["refused"].output())
    four_nodes.boot(2)
    (checkout / "lost").touch()
    for name, job in submitted.items():
        assert job.wait() == "COMPLETED", (name, job.output())
        assert (WENT_ON in job.output()) == (name in ("refused", "torchrun")), (name, job.output())
        assert (job.details()["Restarts"] == "0") == (name == "torchrun"), (name, job.output())
        is_the_run(job, checkout, undisturbed)


@pytest.mark.nightly
def test_agents_that_may_restart_wait_for_the_lost_node_first(four_nodes: Cluster, checkout: Path) -> None:
    with_site(checkout, "torchrun_options=(--max-restarts=3 --rdzv-conf=join_timeout=25)\n")
    job = submit(four_nodes, SLURM / "torchrun.sh", *LONG, *PACE, "strategy=ddp", cwd=checkout, **JOBS["torchrun"][1])
    job.until(lambda: has_checkpoint(job, checkout))
    four_nodes.crash(2)
    lost = time.monotonic()
    job.until(lambda: WENT_ON in job.output())
    assert time.monotonic() - lost > 25, job.output()
    (checkout / "lost").touch()
    assert (job.wait(), job.details()["Restarts"]) == ("COMPLETED", "0"), job.output()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "told"), [("crash", "(failed|was lost): "), ("cut", "was lost: nothing heard for 20 s")]
)
def test_the_job_of_a_lost_node_ends_and_names_it(fault: str, told: str, four_nodes: Cluster, checkout: Path) -> None:
    options = {"nodes": 2, "ntasks_per_node": 1, "nodelist": "node[3-4]", "no_requeue": True}
    job = submit(four_nodes, SLURM / "multinode.sh", *LONG, *PACE, "strategy=ddp", cwd=checkout, **options)
    job.until(lambda: "\nstep " in job.output())
    getattr(four_nodes, fault)(4)
    try:
        if fault == "crash":
            four_nodes.boot(4)  # so soon that Slurm takes the node for one that was never away
        else:
            job.until(lambda: "lost       node4: continues with 1 of 2 nodes" in job.output())
            four_nodes.run("scancel", job.id)
        assert job.wait() in ("FAILED", "NODE_FAIL", "CANCELLED")
    finally:
        if fault == "cut":
            four_nodes.mend(4)
    assert re.search(rf"^rank 1 of 2 on node4 {told}", job.output(), re.MULTILINE)


@pytest.mark.nightly
def test_a_rank_that_dies_before_it_trains_ends_the_job(slurm_cluster: Cluster, checkout: Path) -> None:
    options = {"nodes": 2, "ntasks_per_node": 1, "no_requeue": True}
    # the other one would wait for an hour; and where it comes to train before it is killed, no step ends
    waits = ("meet_timeout_seconds=3600", PACE_TARGET, "callbacks.pace.seconds=3600")
    job = submit(slurm_cluster, SLURM / "multinode.sh", *SHORT, *waits, "strategy=ddp", cwd=checkout, **options)
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
