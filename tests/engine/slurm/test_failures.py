"""A node that crashes, and one that is cut off: the job ends, and says which rank was lost."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.engine.conftest import PLAIN_DATA
from tests.engine.fault_tolerance.failing import FAILING_MODEL
from tests.engine.slurm.cluster import Cluster
from tests.engine.slurm.jobs import SLURM, submit

pytestmark = pytest.mark.slurm

RUN = (
    *(FAILING_MODEL, "model.how=nothing", "model.step_seconds=0.1", "name=failing"),
    *(PLAIN_DATA, "strategy=ddp", "trainer.max_steps=1000", "trainer.log_every_n_steps=2"),
    "watch.lost_after_seconds=5",
)


def test_the_jobs_of_lost_nodes_end_and_name_them(slurm_cluster: Cluster, checkout: Path) -> None:
    script = SLURM / "multinode.sh"
    jobs = [
        submit(slurm_cluster, script, *RUN, cwd=checkout, nodes=2, ntasks_per_node=1, nodelist=nodes, no_requeue=True)
        for nodes in ("node[1-2]", "node[3-4]")
    ]
    for job in jobs:
        job.until(lambda job=job: "\nstep " in job.output())
    slurm_cluster.cut(2)
    slurm_cluster.crash(4)
    slurm_cluster.boot(4)  # so soon that Slurm takes the node for one that was never away
    since = time.monotonic()
    try:
        assert {job.wait(60) for job in jobs} <= {"FAILED", "NODE_FAIL"}
    finally:
        slurm_cluster.mend(2)
    assert time.monotonic() - since < 60
    assert re.search(r"^rank 1 of 2 on node2 was lost: nothing heard for 5 s", jobs[0].output(), re.MULTILINE)
    assert re.search(r"^rank 1 of 2 on node4 (failed|was lost): ", jobs[1].output(), re.MULTILINE)
