"""Jobs that are killed at a file operation are requeued, and end as a run that was not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import Train
from tests.engine.faults.__main__ import CADENCES, RUN, ended, library
from tests.engine.slurm.cluster import Cluster
from tests.engine.slurm.jobs import SLURM, submit, with_site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]
RUN_OF_JOB = tuple(setting for setting in RUN if not setting.startswith("run_id="))


@pytest.mark.parametrize("number", [60, 150, 240, 330])
def test_a_job_that_is_killed_at_a_file_operation_ends_as_one_that_was_not(
    number: int, slurm_cluster: Cluster, checkout: Path, train: Train
) -> None:
    run = (*RUN_OF_JOB, *CADENCES["meet"], "strategy=ddp")
    whole = ended(train(*run, ranks=2).run_dir)
    fault = f"LD_PRELOAD={library()} FAULT_UNDER={checkout}/runs FAULT_RANK=0 FAULT_AT={number} FAULT_HOW=kill"
    with_site(checkout, f"if ((${{SLURM_RESTART_COUNT:-0}} == 0)); then export {fault}; fi\n")
    job = submit(slurm_cluster, SLURM / "multinode.sh", *run, cwd=checkout, nodes=2, ntasks_per_node=1)
    assert job.wait() == "COMPLETED", job.output()
    assert int(job.details()["Restarts"]) >= 1, "the fault was met"
    (run_dir,) = (checkout / "runs/plainmodel").iterdir()
    assert ended(run_dir).difference(whole) is None
