"""Sweeps on a real cluster: as an array of slurm/sweep.sh, and by Hydra's launcher for submitit."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.conftest import CHECKOUT, PLAIN
from tests.engine.failures.pace import FAILS_ONCE
from tests.engine.launch.witness import WITNESS, witnesses
from tests.engine.slurm.cluster import Cluster
from tests.engine.slurm.jobs import Job, submit
from tests.engine.sweeps.test_sweeps import rows

pytestmark = pytest.mark.slurm

Swept = Callable[..., "subprocess.CompletedProcess[str]"]

RUN = (*PLAIN, *WITNESS, "name=plain", "trainer.max_steps=2", "trainer.val_check_interval=2", "strategy=ddp")


@pytest.fixture
def checkout(checkout: Path) -> Path:
    """As for all tests on a cluster, with swept.py in it."""
    (checkout / "swept.py").symlink_to(CHECKOUT / "tests/engine/sweeps/swept.py")
    return checkout


def test_an_array_trains_a_run_in_each_task(slurm_cluster: Cluster, checkout: Path) -> None:
    script, options = CHECKOUT / "slurm/sweep.sh", {"nodes": 1, "ntasks": 1, "array": "0-1"}
    fails_once = f"{FAILS_ONCE} callbacks.fails.step=1"
    lines = ("seed=1", f"seed=2 'model.width=8' {fails_once}")
    array = submit(slurm_cluster, script, *RUN, "--", *lines, cwd=checkout, **options)
    tasks = [Job(slurm_cluster, f"{array.id}_{number}") for number in (0, 1)]
    assert [task.wait() for task in tasks] == ["COMPLETED", "COMPLETED"], tasks[0].output()
    assert [task.details()["Restarts"] for task in tasks] == ["0", "1"]
    runs = checkout / "runs/plain"
    told = [json.loads((runs / task.id / "run.json").read_text())["overrides"] for task in tasks]
    assert "seed=1" in told[0]
    assert {"seed=2", "++model.width=8"} <= set(told[1])


@pytest.fixture
def swept(slurm_cluster: Cluster, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Swept:
    """A sweep by submitit, each job on two nodes."""
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    launcher = ("hydra/launcher=submitit_slurm", "hydra.launcher.nodes=2", "hydra.launcher.timeout_min=5", "run_id=x")

    def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return slurm_cluster.run("python", script, "-m", *launcher, *arguments, cwd=checkout)

    return run


def test_submitit_trains_each_job_on_nodes_of_its_own(swept: Swept, checkout: Path) -> None:
    done = swept("train.py", *RUN, "seed=1,2")
    assert done.returncode == 0, done.stderr + done.stdout
    assert [row[-2] for row in rows(done.stdout)] == ["finished", "finished"]
    for number in ("0", "1"):
        seen = witnesses(checkout / "runs/plain/x" / number)
        assert [(rank["world_size"], rank["node_rank"], rank["cluster"]) for rank in seen] == [
            (2, 0, "SLURMEnvironment"),
            (2, 1, "SLURMEnvironment"),
        ]


def test_a_task_that_fails_ends_its_job_and_not_the_sweep(swept: Swept) -> None:
    done = swept("swept.py", "name=half,whole", "seed=1")
    assert done.returncode == 1, done.stderr
    assert [row[-2] for row in rows(done.stdout)] == ["failed", "finished"]
    assert done.stdout.endswith("job 0      rank 1 of 2 on node2 failed: RuntimeError: it is broken\n")
