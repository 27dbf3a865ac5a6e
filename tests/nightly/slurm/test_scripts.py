"""What the job scripts make of sbatch's options, each by the script that a day leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.slurm.cluster import Cluster
from tests.engine.slurm.test_scripts import SCRIPTS, reaches_srun

pytestmark = pytest.mark.slurm


def test_what_sbatch_is_asked_for_reaches_srun(slurm_cluster: Cluster, tmp_path: Path) -> None:
    reaches_srun(SCRIPTS[::-1], slurm_cluster, tmp_path)
