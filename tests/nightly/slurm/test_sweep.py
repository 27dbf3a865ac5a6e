"""A sweep on a real cluster, as an array of slurm/sweep.sh."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.conftest import CHECKOUT, PLAIN
from tests.engine.failures.pace import FAILS_ONCE
from tests.engine.launch.witness import WITNESS
from tests.engine.slurm.cluster import Cluster
from tests.engine.slurm.jobs import Job, submit

pytestmark = pytest.mark.slurm

RUN = (*PLAIN, *WITNESS, "name=plain", "trainer.max_steps=2", "trainer.val_check_interval=2", "strategy=ddp")


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
