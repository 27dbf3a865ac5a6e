"""`sbatch slurm/multinode.sh` trains in a fork."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.fork.forks import clone_into, environment, made
from tests.engine.slurm.cluster import Cluster
from tests.engine.slurm.jobs import submit

pytestmark = pytest.mark.slurm


def test_a_fork_trains_over_nodes(slurm_cluster: Cluster, tmp_path: Path) -> None:
    fork = made(clone_into(tmp_path / "clone"), tmp_path / "birdsong", "--bare")
    environment(fork, "--editable", ".")
    job = submit(slurm_cluster, fork / "slurm/multinode.sh", "strategy=fsdp", "debug=limit", cwd=fork, nodes=2)
    assert job.details()["JobName"] == "birdsong"
    assert job.wait() == "COMPLETED", job.output()
    assert "test/accuracy" in job.output()
