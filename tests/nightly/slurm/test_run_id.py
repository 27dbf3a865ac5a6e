"""What names a run on a real cluster, and who may write its directory."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lightswitch.runs import lock
from tests.engine.conftest import CHECKOUT
from tests.engine.failures.pace import PACE_TARGET
from tests.engine.slurm import jobs
from tests.engine.slurm.cluster import Cluster
from tests.engine.slurm.jobs import submit

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]

RUN = (*jobs.RUN, "trainer.max_steps=2", "trainer.val_check_interval=2")
PACE = (PACE_TARGET, "callbacks.pace.seconds=2", "callbacks.pace.until=requeued")


@pytest.fixture(autouse=True)
def _tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))


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


def test_a_job_that_is_requeued_to_another_node_has_its_run_directory_at_once(
    slurm_cluster: Cluster, checkout: Path
) -> None:
    run = (*RUN, *PACE, "trainer.max_steps=20", "callbacks.last_checkpoint.every_n_steps=2")
    job = submit(slurm_cluster, CHECKOUT / "slurm/multinode.sh", *run, cwd=checkout, nodes=1, ntasks=1)
    path = checkout / "runs/plain" / job.id / lock.FILE
    job.until(lambda: list(path.parent.glob("checkpoints/step_*.ckpt")))
    first = json.loads(path.read_text())
    slurm_cluster.run("scontrol", "update", f"NodeName={first['host']}", "State=DRAIN", "Reason=test")
    # the node is gone with all on it, and no end of its processes was seen: its machine is another one for the next
    path.write_text(json.dumps({**first, "boot": "gone"}))
    slurm_cluster.run("scontrol", "requeue", job.id)
    job.until(lambda: job.details()["Restarts"] == "1")
    (checkout / "requeued").touch()
    assert job.wait() == "COMPLETED", job.output()
    slurm_cluster.run("scontrol", "update", f"NodeName={first['host']}", "State=RESUME")
    assert "resumes    " in job.output()
    assert "waiting    " not in job.output()
    assert not path.exists()
