"""What a dry run says of a job is what the script of slurm/ starts."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from lightswitch.launch import dry_run
from lightswitch.planning.fakes import World
from tests.engine.conftest import CHECKOUT

WORDS = ["strategy=fsdp", "data.files=[a b.txt]"]


@pytest.mark.parametrize(
    ("kind", "of_slurm"), [("cuda", {"SLURM_GPUS_PER_NODE": "h100:4"}), ("cpu", {"SLURM_NTASKS": "8"})]
)
def test_the_script_starts_what_a_dry_run_says(tmp_path: Path, kind: str, of_slurm: dict[str, str]) -> None:
    told = dry_run.job_script(CHECKOUT, World(2, 4), kind, ["python", "train.py"], WORDS)
    given = _given_to_srun(tmp_path, SLURM_NNODES="2", SLURM_CPUS_ON_NODE="16", **of_slurm)
    options = {word for word in shlex.split(told["srun"]) if word.startswith("--")}
    assert options == {word for word in given if word.startswith(("--nodes", "--ntasks", "--gpus"))}
    assert shlex.split(told["srun"])[-3:] == ["train.py", *WORDS]
    assert given[-3:] == [str(CHECKOUT / "train.py"), *WORDS]


def test_what_is_typed_counts_before_what_the_script_says() -> None:
    told = dry_run.job_script(CHECKOUT, World(128, 8), "cuda", ["python", "train.py"], WORDS)
    assert told["submit"].startswith("sbatch --nodes=128 --gpus-per-node=8 slurm/multinode.sh strategy=fsdp ")
    options = shlex.split(told["#SBATCH"])
    assert {"--nodes=128", "--gpus-per-node=8", "--exclusive", "--requeue"} <= set(options)
    assert "--nodes=2" not in options


def test_one_node_is_shared() -> None:
    told = dry_run.job_script(CHECKOUT, World(1, 2), "cuda", ["python", "train.py"], WORDS)
    assert told["submit"].startswith("sbatch --nodes=1 --gpus-per-node=2 slurm/single.sh strategy=fsdp ")
    assert "--exclusive" not in told["#SBATCH"]
    assert "--time=04:00:00" in told["#SBATCH"]
    told = dry_run.job_script(CHECKOUT, World(1, 2), "cpu", ["python", "train.py"], WORDS)
    assert told["submit"].startswith("sbatch --nodes=1 --gpus-per-node=0 --ntasks-per-node=2 slurm/single.sh ")


def test_without_a_script_there_is_no_job(tmp_path: Path) -> None:
    assert dry_run.job_script(tmp_path, World(1, 1), "cpu", ["python", "train.py"], []) == {}


def _given_to_srun(folder: Path, **environment: str) -> list[str]:
    """Run the script with an srun that writes down its arguments."""
    srun = folder / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\n" "$@" > "$GIVEN"\n')
    srun.chmod(0o755)
    given = {"PATH": f"{folder}:{os.environ['PATH']}", "GIVEN": str(folder / "given")}
    given |= {"SLURM_JOB_ID": "1", "HOME": str(folder), **environment}
    subprocess.run(["bash", CHECKOUT / "slurm/multinode.sh", *WORDS], check=True, env=given, cwd=folder)
    return (folder / "given").read_text().splitlines()


def test_each_script_finds_what_they_share_in_the_same_lines() -> None:
    """Slurm copies one script, so these have to stand in each."""
    scripts = [path.read_text() for path in (CHECKOUT / "slurm").glob("*.sh") if "\n#SBATCH" in path.read_text()]
    beginnings = {text[text.index("set -euo") : text.index('source "$scripts/job.sh"')] for text in scripts}
    assert (len(scripts), len(beginnings)) == (4, 1)
