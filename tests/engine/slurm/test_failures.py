"""A node that crashes, or is cut off: the job ends, and says which rank was lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engine.conftest import PLAIN_DATA
from tests.engine.failures.failing import FAILING_MODEL
from tests.engine.slurm.cluster import Cluster
from tests.engine.slurm.jobs import SLURM, submit

pytestmark = [pytest.mark.nightly, pytest.mark.slurm]

RUN = (
    *(FAILING_MODEL, "model.how=nothing", "model.step_seconds=0.1", "name=failing"),
    *(PLAIN_DATA, "strategy=ddp", "trainer.max_steps=1000", "trainer.log_every_n_steps=2"),
    "watch.lost_after_seconds=20",
)


@pytest.mark.parametrize(
    ("fault", "told"), [("crash", "(failed|was lost): "), ("cut", "was lost: nothing heard for 20 s")]
)
def test_the_job_of_a_lost_node_ends_and_names_it(
    fault: str, told: str, slurm_cluster: Cluster, checkout: Path
) -> None:
    options = {"nodes": 2, "ntasks_per_node": 1, "nodelist": "node[3-4]", "no_requeue": True}
    job = submit(slurm_cluster, SLURM / "multinode.sh", *RUN, cwd=checkout, **options)
    job.until(lambda: "\nstep " in job.output())
    getattr(slurm_cluster, fault)(4)
    if fault == "crash":
        slurm_cluster.boot(4)  # so soon that Slurm takes the node for one that was never away
    try:
        if fault == "cut":
            job.until(lambda: "lost       node4: continues with 1 of 2 nodes" in job.output())
            slurm_cluster.run("scancel", job.id)
        assert job.wait() in ("FAILED", "NODE_FAIL", "CANCELLED")
    finally:
        if fault == "cut":
            slurm_cluster.mend(4)
    assert re.search(rf"^rank 1 of 2 on node4 {told}", job.output(), re.MULTILINE)
