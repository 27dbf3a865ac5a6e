"""A bug may pass at another start; a mistake would be made again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import CHECKOUT, PLAIN_DATA
from tests.engine.slurm.cluster import Cluster
from tests.engine.slurm.jobs import submit

pytestmark = pytest.mark.slurm

RUN = (
    *(
        "model._target_=tests.engine.fault_tolerance.failing.FailingModel",
        PLAIN_DATA,
        "strategy=ddp",
    ),
    *("model.how=refuses", "trainer.accelerator=cpu", "trainer.max_steps=6", "model.rank=null"),
)


def test_a_job_is_started_again_after_a_bug_and_not_after_a_mistake(slurm_cluster: Cluster, checkout: Path) -> None:
    (checkout / "slurm").unlink()
    (checkout / "slurm").mkdir()
    (checkout / "slurm/job.sh").symlink_to(CHECKOUT / "slurm/job.sh")
    (checkout / "slurm/site.sh").write_text("max_failures=1\n")
    script = CHECKOUT / "slurm/multinode.sh"
    wheres = {"bug": "'training_step 3'", "mistake": "setup"}
    jobs = {
        name: submit(slurm_cluster, script, *RUN, f"model.where={where}", cwd=checkout, nodes=1, ntasks_per_node=2)
        for name, where in wheres.items()
    }
    assert {job.wait() for job in jobs.values()} == {"FAILED"}
    ended = {name: (job.details()["ExitCode"], job.details()["Restarts"]) for name, job in jobs.items()}
    assert ended == {"bug": ("1:0", "1"), "mistake": ("2:0", "0")}
    assert "failed with exit code 1, time 1 of at most 1: requeued\n" in jobs["bug"].output()
    assert jobs["mistake"].output().count("error: model: this is no batch of mine\n") == 1
    assert "Traceback" not in jobs["mistake"].output()
