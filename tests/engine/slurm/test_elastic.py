"""`sbatch --nodes=MIN-MAX` takes what there is, and a job that lost a node goes on with the rest."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import Finished, runs_in
from tests.engine.failures.pace import PACE_TARGET
from tests.engine.slurm import jobs
from tests.engine.slurm.cluster import Cluster
from tests.engine.slurm.jobs import SLURM, Job, submit, with_site

pytestmark = [pytest.mark.nightly, pytest.mark.slurm, pytest.mark.timeout(3600)]

RUN = (
    *(*jobs.RUN, "trainer.accelerator=cpu", "global_batch_size=24", "trainer.max_steps=60"),
    *("trainer.val_check_interval=20", "trainer.log_every_n_steps=1", "callbacks.last_checkpoint.every_n_steps=5"),
    "watch.lost_after_seconds=20",
)
PACE = (PACE_TARGET, "callbacks.pace.seconds=1", "callbacks.pace.until=lost")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return runs_in(tmp_path_factory.mktemp("undisturbed"))(*RUN, "strategy=single")


@pytest.fixture
def four_nodes(slurm_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, whose four nodes are up again at the end."""
    yield slurm_cluster
    for node in slurm_cluster.nodes:
        if f"node{node}" not in slurm_cluster.processes:
            slurm_cluster.boot(node)


def test_a_job_that_lost_a_node_goes_on_with_the_rest(
    four_nodes: Cluster, checkout: Path, undisturbed: Finished
) -> None:
    options = {"nodes": "2-3", "gpus_per_node": 1, "exclude": "node4"}
    job = submit(four_nodes, SLURM / "multinode.sh", *RUN, *PACE, "strategy=ddp", cwd=checkout, **options)
    job.until(lambda: (checkout / "runs/plain" / job.id / "metrics.csv").exists())
    assert job.details()["NodeList"] == "node[1-3]"
    job.until(lambda: list((checkout / "runs/plain" / job.id / "checkpoints").glob("*")))
    four_nodes.crash(3)
    (checkout / "lost").touch()
    assert job.wait() == "COMPLETED", job.output()
    assert job.details()["Restarts"] == "0"
    assert "lost       node3: continues with 2 of 3 nodes" in job.output()
    assert re.search(r"^world      3 nodes × 1 → 2 nodes × 1 at step \d+: lost node3$", job.output(), re.MULTILINE)
    run = Finished(0, job.output(), "", checkout, job.id)
    for metric in ("train/loss", "val/loss", "test/loss"):
        assert run.column(metric) == pytest.approx(undisturbed.column(metric), abs=1e-5), (metric, job.output())


# by name: a job's script, and its nodes, of which node2 will be lost
JOBS = {
    "waits": ("multinode.sh", {"nodes": 2, "nodelist": "node[1-2]"}),
    "refused": ("multinode.sh", {"nodes": 2, "nodelist": "node[1-2]"}),
    "torchrun": ("torchrun.sh", {"nodes": 2, "nodelist": "node[1-2]"}),
    "headless": ("multinode.sh", {"nodes": "1-2", "exclude": "node1,node4"}),  # whose script node2 runs
}
SITE = "[[ $SLURM_JOB_NAME != waits ]] || min_nodes=2\n"
WENT_ON = "lost       node2: continues with 1 of 2 nodes"
# a train.py for so many nodes or a multiple of them, whose tasks end when one is lost, as ranks do
TRAIN = """
import os, pathlib, sys, time
began, nodes, lost = time.time(), int(os.environ["SLURM_STEP_NUM_NODES"]), pathlib.Path("lost")
if os.environ["SLURM_PROCID"] == "0":
    print(f"trains on {nodes}", flush=True)
if nodes % int(sys.argv[1]):
    sys.exit(2)
while not pathlib.Path("ended").exists():
    if lost.exists() and lost.stat().st_mtime > began:
        sys.exit(1)
    time.sleep(0.1)
"""


def submit_all(cluster: Cluster, checkout: Path, words: Callable[[str], tuple[str, ...]]) -> dict[str, Job]:
    with_site(checkout, SITE)
    return {
        name: submit(*(cluster, SLURM / script, *words(name)), cwd=checkout, job_name=name, exclusive="user", **options)
        for name, (script, options) in JOBS.items()
    }


def end_as_they_should(submitted: dict[str, Job]) -> None:
    for name, job in submitted.items():
        assert job.wait() == "COMPLETED", (name, job.output())
        assert (WENT_ON in job.output()) == (name in ("refused", "torchrun")), (name, job.output())
        assert (job.details()["Restarts"] == "0") == (name == "torchrun"), (name, job.output())


def test_what_becomes_of_jobs_that_lose_a_node(four_nodes: Cluster, checkout: Path) -> None:
    """With too few left for the site or for the run, by torchrun, and without the job script; at night they train."""
    submitted = submit_all(four_nodes, checkout, lambda name: ("2" if name == "refused" else "1",))
    (checkout / "train.py").unlink()
    (checkout / "train.py").write_text(TRAIN)
    for job in submitted.values():
        job.until(lambda job=job: "trains on 2" in job.output())
    four_nodes.crash(2)
    (checkout / "lost").touch()
    for name in ("torchrun", "headless"):
        submitted[name].until(lambda name=name: "trains on 1" in submitted[name].output())
    submitted["refused"].until(lambda: WENT_ON in submitted["refused"].output())
    four_nodes.boot(2)
    for name in ("waits", "refused"):
        submitted[name].until(lambda name=name: submitted[name].output().count("trains on 2") == 2)
    (checkout / "ended").touch()
    end_as_they_should(submitted)


def test_agents_that_may_restart_wait_for_the_lost_node_first(four_nodes: Cluster, checkout: Path) -> None:
    with_site(checkout, "torchrun_options=(--max-restarts=3 --rdzv-conf=join_timeout=25)\n")
    (checkout / "train.py").unlink()
    (checkout / "train.py").write_text(TRAIN)
    job = submit(four_nodes, SLURM / "torchrun.sh", "1", cwd=checkout, exclusive="user", **JOBS["torchrun"][1])
    job.until(lambda: "trains on 2" in job.output())
    four_nodes.crash(2)
    (checkout / "lost").touch()
    lost = time.monotonic()
    job.until(lambda: WENT_ON in job.output())
    assert time.monotonic() - lost > 25, job.output()
    job.until(lambda: "trains on 1" in job.output())
    (checkout / "ended").touch()
    assert job.wait() == "COMPLETED", job.output()
    assert job.details()["Restarts"] == "0"


def test_what_becomes_of_runs_that_lose_a_node(four_nodes: Cluster, checkout: Path, undisturbed: Finished) -> None:
    strategy = {"refused": ("strategy=fsdp_hybrid", "trainer.strategy.shard_size=2")}
    submitted = submit_all(four_nodes, checkout, lambda name: (*RUN, *PACE, *strategy.get(name, ("strategy=ddp",))))
    for job in submitted.values():
        job.until(lambda job=job: list((checkout / "runs/plain" / job.id / "checkpoints").glob("*")))
    four_nodes.crash(2)
    for name in ("torchrun", "headless"):
        submitted[name].until(lambda name=name: "1 node × 1 at step" in submitted[name].output())
    submitted["refused"].until(lambda: WENT_ON in submitted["refused"].output())
    four_nodes.boot(2)
    (checkout / "lost").touch()
    end_as_they_should(submitted)
    for name, job in submitted.items():
        run = Finished(0, job.output(), "", checkout, job.id)
        for metric in ("train/loss", "val/loss", "test/loss"):
            assert run.column(metric) == pytest.approx(undisturbed.column(metric), abs=1e-5), (name, metric)
