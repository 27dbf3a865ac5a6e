"""Runs on a real cluster: what names them, a drained node, a kill at a file operation, a fork; and the doctor."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightswitch.runs import claim
from tests.engine.conftest import CHECKOUT
from tests.engine.failures.pace import PACE_TARGET
from tests.engine.fork.forks import clone_into, environment, made
from tests.engine.slurm import jobs
from tests.engine.slurm.cluster import SUBNET, Cluster
from tests.engine.slurm.jobs import submit

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]

RUN = (*jobs.RUN, "trainer.max_steps=2", "trainer.val_check_interval=2")
PACE = (PACE_TARGET, "callbacks.pace.seconds=2", "callbacks.pace.until=requeued")


@pytest.fixture
def _imports_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))


@pytest.mark.usefixtures("_imports_tests")
def test_what_is_typed_in_an_allocation_is_a_run_each(slurm_cluster: Cluster, checkout: Path) -> None:
    """By `python` and, as a step each, by `srun python`."""
    (checkout / "swept.py").symlink_to(CHECKOUT / "tests/engine/sweeps/swept.py")
    commands = (f"{srun}python swept.py seed={seed}" for seed, srun in enumerate(("", "", "srun -n1 ", "srun -n1 "), 1))
    done = slurm_cluster.run("salloc", "-n1", "bash", "-ec", "; ".join(commands), cwd=checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = {json.loads(path.read_text())["val/loss"] * 4: path.parent.name for path in checkout.glob("runs/*/*/*.json")}
    assert runs[3].isdecimal()
    assert runs[4] == f"{runs[3]}.1"
    assert runs[1] != runs[2]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d_.*", runs[seed]) for seed in (1, 2))


@pytest.mark.usefixtures("_imports_tests")
def test_a_job_that_is_requeued_to_another_node_has_its_run_directory_at_once(
    slurm_cluster: Cluster, checkout: Path
) -> None:
    run = (*RUN, *PACE, "trainer.max_steps=20", "callbacks.last_checkpoint.every_n_steps=2")
    job = submit(slurm_cluster, CHECKOUT / "slurm/multinode.sh", *run, cwd=checkout, nodes=1, ntasks=1)
    path = checkout / "runs/plain" / job.id / claim.LOCK
    job.until(lambda: list(path.parent.glob("checkpoints/step_*.ckpt")))
    first = json.loads(path.read_text())
    slurm_cluster.run("scontrol", "update", f"NodeName={first['host']}", "State=DRAIN", "Reason=test")
    slurm_cluster.run("scontrol", "requeue", job.id)
    job.until(lambda: job.details()["Restarts"] == "1")
    (checkout / "requeued").touch()
    assert job.wait() == "COMPLETED", job.output()
    slurm_cluster.run("scontrol", "update", f"NodeName={first['host']}", "State=RESUME")
    assert "resumes    " in job.output()
    assert "waiting    " not in job.output()
    assert not path.exists()


def test_a_fork_trains_over_nodes(slurm_cluster: Cluster, tmp_path: Path) -> None:
    fork = made(clone_into(tmp_path / "clone"), tmp_path / "birdsong", "--bare")
    environment(fork, *map(str, fork.glob("wheels/*")), "--editable", ".")
    job = submit(slurm_cluster, fork / "slurm/multinode.sh", "strategy=fsdp", "debug=limit", cwd=fork, nodes=2)
    assert job.wait() == "COMPLETED", job.output()
    assert "test/accuracy" in job.output()


# The doctor


@pytest.fixture
def wall(slurm_cluster: Cluster) -> Iterator[None]:
    """Between node2 and node3; each of them still reaches node1."""
    from_node2 = ["nsenter", f"--net=/proc/{slurm_cluster.first_pids['node2']}/ns/net", "ip", "route"]
    way = ["unreachable", f"{SUBNET}.3/32"]
    subprocess.run([*from_node2, "add", *way], check=True)
    yield
    subprocess.run([*from_node2, "del", *way], check=True)


@pytest.mark.usefixtures("wall")
def test_two_nodes_that_do_not_reach_each_other_are_named(slurm_cluster: Cluster, tmp_path: Path) -> None:
    srun = ("srun", "--nodes=3", "--nodelist=node[1-3]", "--ntasks-per-node=1", "--cpus-per-task=1")
    done = slurm_cluster.run(*srun, "python", "-m", "lightswitch.doctor", cwd=tmp_path)
    assert done.returncode == 1
    named = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("node")]
    assert named == ["node1", "node2", "node3"]
    assert re.search(
        r"^problem     an all-reduce over gloo .*; check routes and firewalls, or export", done.stdout, re.M
    )
