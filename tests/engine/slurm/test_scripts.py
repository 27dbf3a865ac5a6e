"""What the job scripts make of sbatch's options, against what they made of them before: tests/engine/slurm/golden."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import pytest

from tests.engine.slurm.cluster import Cluster
from tests.engine.slurm.jobs import SLURM, submit, with_site

pytestmark = pytest.mark.slurm

GOLDEN = Path(__file__).parent / "golden"
SCRIPTS = ("multinode", "torchrun")
OPTIONS = {
    "defaults": {},
    "four_nodes_of_one_gpu": {"nodes": 4, "gpus_per_node": 1},
    "tasks_on_each_node": {"nodes": 1, "ntasks_per_node": 4},
    "tasks_in_all": {"ntasks": 6, "cpus_per_task": 1},
    "a_gpu_for_each_task": {"ntasks": 2, "gpus_per_task": 1},
    "gres": {"nodes": 2, "gres": "gpu:2"},
}
# in the place of srun: what it was asked for, then a command that shows what a task of it would see
SITE = """
unset OMP_NUM_THREADS
srun() {
  echo "srun $*" |
    sed "s#[^ ]*/python #python #; s#[^ ]*/train.py#train.py#" |
    sed "s/node[0-9]:2[0-9]\\{4\\}/FIRST:PORT/; s/--rdzv-id=[0-9]*/--rdzv-id=JOB/"
  echo "OMP_NUM_THREADS=$OMP_NUM_THREADS"
}
"""


def test_what_sbatch_is_asked_for_reaches_srun(slurm_cluster: Cluster, tmp_path: Path) -> None:
    """Each option by one script; by the other at night."""
    reaches_srun(SCRIPTS, slurm_cluster, tmp_path)


def reaches_srun(scripts: Sequence[str], cluster: Cluster, folder: Path) -> None:
    """With the options in turn, all submitted at once."""
    with_site(folder, SITE)
    (folder / "train.py").touch()
    words = ("strategy=fsdp", "model.x='a b'")
    jobs = {
        GOLDEN / f"{script}_{name}.txt": submit(cluster, SLURM / f"{script}.sh", *words, cwd=folder, **options)
        for script, (name, options) in zip(cycle(scripts), OPTIONS.items(), strict=False)
    }
    for golden, job in jobs.items():
        assert job.wait() == "COMPLETED", job.output()
        if "LIGHTSWITCH_WRITE_GOLDEN" in os.environ:
            golden.write_text(job.printed())
        assert job.printed() == golden.read_text(), golden.name


def test_tasks_see_what_their_node_has(slurm_cluster: Cluster, checkout: Path) -> None:
    (checkout / "train.py").unlink()
    shown = "from os import environ as e; print(e['CUDA_VISIBLE_DEVICES'], e['SLURM_NTASKS'])"
    (checkout / "train.py").write_text(shown)
    job = submit(slurm_cluster, SLURM / "multinode.sh", cwd=checkout, nodes=2, ntasks_per_node=2)
    assert job.wait() == "COMPLETED", job.output()
    assert job.printed() == 4 * "0,1 4\n"


def test_a_site_can_start_python_in_a_container(slurm_cluster: Cluster, tmp_path: Path) -> None:
    with_site(tmp_path, "python=(echo inside image.sif python)\n")
    (tmp_path / "train.py").touch()
    job = submit(slurm_cluster, SLURM / "multinode.sh", "seed=1", cwd=tmp_path, nodes=1)
    assert job.wait() == "COMPLETED", job.output()
    assert set(job.printed().splitlines()) == {"inside image.sif python train.py seed=1"}
