"""What clusters are like: shared nodes, checkouts that nobody may write, several Pythons, nodes that differ."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.engine.slurm import jobs
from tests.engine.slurm.cluster import Cluster
from tests.engine.slurm.jobs import SLURM, Job, submit, with_site

pytestmark = pytest.mark.slurm

# a train.py that says what it sees, and waits for so many jobs
MEETS = """
import os, pathlib, sys, time
pathlib.Path(os.environ["SLURM_JOB_ID"]).touch()
until = time.monotonic() + 600
while len(there := list(pathlib.Path().glob("[0-9]*"))) < int(sys.argv[1]) and time.monotonic() < until:
    time.sleep(0.1)
print(os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["SLURM_CPUS_PER_TASK"], len(there))
"""


def test_jobs_of_one_gpu_share_a_node(slurm_cluster: Cluster, checkout: Path) -> None:
    (checkout / "train.py").unlink()
    (checkout / "train.py").write_text(MEETS)
    pair = [submit(slurm_cluster, SLURM / "single.sh", "2", cwd=checkout, nodelist="node1") for _ in range(2)]
    assert [job.wait() for job in pair] == ["COMPLETED", "COMPLETED"], pair[0].output()
    assert sorted(job.printed() for job in pair) == ["0 4 2\n", "1 4 2\n"]
    assert pair[0].details()["TimeLimit"] == "04:00:00"
    both = submit(slurm_cluster, SLURM / "single.sh", "1", cwd=checkout, gpus_per_node=2)
    gres = submit(slurm_cluster, SLURM / "single.sh", "1", cwd=checkout, gres="gpu:2")
    none = submit(slurm_cluster, SLURM / "single.sh", "1", cwd=checkout, gpus_per_node=0)
    assert [job.wait() for job in (both, gres, none)] == ["COMPLETED"] * 3, none.output()
    assert [len(job.printed().splitlines()) for job in (both, gres, none)] == [2, 2, 1]


def test_where_no_run_can_be_written_a_line_says_what_to_do(
    slurm_cluster: Cluster, read_only: Path, tmp_path: Path
) -> None:
    options = {"gpus_per_node": 0, "export": f"ALL,HOME={tmp_path}"}
    job = submit(slurm_cluster, SLURM / "single.sh", *jobs.RUN, cwd=read_only, **options)
    assert (job.wait(), job.details()["ExitCode"]) == ("FAILED", "2:0"), job.output()
    assert job.log() == tmp_path / f"slurm-{job.id}.out"
    line = r"error: the run directory can't be made: \[Errno 30\] Read-only file system: 'runs\S*'; type hydra.run.dir="
    assert re.search(line, job.output())  # a checkout in which someone has trained has the folder


# in the place of srun: the command that it would start
SITE = 'srun() { while [[ $1 == --* ]]; do shift; done; shift 3; echo "$*"; }\n'
BY_HAND = "VIRTUAL_ENV=,CONDA_PREFIX=,CONDA_DEFAULT_ENV="


def test_a_job_says_which_python_it_takes(slurm_cluster: Cluster, tmp_path: Path) -> None:
    """By site.sh, else of the environment that sbatch was typed in, else .venv, else the first in PATH."""
    for folder in ("own", "mine", "conda", "checkout/.venv"):
        (tmp_path / folder / "bin").mkdir(parents=True)
        (tmp_path / folder / "bin/python").symlink_to(sys.executable)
    checkout, site = tmp_path / "checkout", tmp_path / "site"
    site.mkdir()
    with_site(checkout, SITE)
    with_site(site, SITE + f"python=({tmp_path}/own/bin/python -u)\n")
    conda = f"CONDA_PREFIX={tmp_path}/conda,CONDA_DEFAULT_ENV"
    asked = {
        (site, f"VIRTUAL_ENV={tmp_path}/mine"): ("own/bin/python -u", "python of slurm/site.sh"),
        (checkout, f"VIRTUAL_ENV={tmp_path}/mine"): (
            "mine/bin/python",
            "the virtual environment active when sbatch ran",
        ),
        (checkout, f"{conda}=mine"): ("conda/bin/python", "the conda environment active when sbatch ran"),
        (checkout, f"{conda}=base"): ("checkout/.venv/bin/python", ".venv of the checkout"),
    }
    submitted = {
        submit(
            slurm_cluster, SLURM / "single.sh", "seed=1", cwd=folder, gpus_per_node=0, export=f"ALL,{BY_HAND},{names}"
        ): told
        for (folder, names), told in asked.items()
    }
    for job, (python, why) in submitted.items():
        assert job.wait() == "COMPLETED", job.output()
        first, command = job.output().splitlines()
        assert first == f"python     {tmp_path}/{python} ({why})"
        assert command == f"{tmp_path}/{python} train.py seed=1"


# what an administrator's modules do, which read variables that nobody has set
MODULES = """
module() {
  [[ "$*" == "load python/3.12 cuda" && -z $NOT_SET ]] || return 1
  PATH=$HOME/modules:$PATH
}
"""


def test_a_site_can_take_each_python_of_the_example(slurm_cluster: Cluster, tmp_path: Path) -> None:
    lines = re.findall(r"^ +(.*python=.*?) #", (SLURM / "site.example.sh").read_text(), re.MULTILINE)
    for there in ("miniconda3/envs/mine/bin/python", "modules/python", "modules/apptainer", "3/.venv/bin/python"):
        (tmp_path / there).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / there).symlink_to(sys.executable)
    jobs = []
    for number, line in enumerate(lines, 1):
        checkout = tmp_path / str(number)
        checkout.mkdir(exist_ok=True)
        with_site(checkout, f"{SITE}{MODULES}PATH=$PATH:$HOME/modules\nworkdir=$checkout/scratch\n{line}\n")
        options = {"gpus_per_node": 0, "export": f"ALL,{BY_HAND},HOME={tmp_path}"}
        jobs.append(submit(slurm_cluster, SLURM / "single.sh", "seed=1", cwd=checkout, **options))
    assert [job.wait() for job in jobs] == 5 * ["COMPLETED"], [job.output() for job in jobs]
    mounted = f"{tmp_path}/4,{tmp_path}/4/scratch"
    assert [job.output().splitlines()[0].removesuffix(" (python of slurm/site.sh)") for job in jobs] == [
        f"python     {tmp_path}/miniconda3/envs/mine/bin/python",
        f"python     {tmp_path}/modules/python",
        f"python     {tmp_path}/3/.venv/bin/python",
        f"python     {tmp_path}/modules/apptainer exec --nv --bind {mounted} {tmp_path}/4/image.sif python",
        "python     /usr/bin/env python",
    ]
    assert jobs[3].printed().endswith(f"{tmp_path}/4/image.sif python {tmp_path}/4/train.py seed=1\n")


def test_a_python_that_is_not_there_is_a_line_as_is_what_site_sh_prints(slurm_cluster: Cluster, tmp_path: Path) -> None:
    with_site(tmp_path, f"echo from the site\nworkdir={tmp_path}/scratch/mine\npython=(pyhton)\n")
    job = submit(slurm_cluster, SLURM / "single.sh", cwd=tmp_path, gpus_per_node=0)
    assert (job.wait(), job.details()["ExitCode"]) == ("FAILED", "2:0")
    assert job.log() == tmp_path / f"scratch/mine/runs/slurm-{job.id}.out"
    assert job.output() == (
        "from the site\n"
        "error: found no pyhton, python of slurm/site.sh; set python=(/path/to/python) in slurm/site.sh\n"
    )


REFUSED = {
    "--gpus=3": "found --gpus=3 over 2 nodes, but each node must have the same number; use --gpus-per-node=N",
    "--ntasks=3": "found 3 tasks on 2 nodes, but each node must have the same number; use --ntasks-per-node=N",
    "--partition=large --nodelist=node4,node5": "found GPUs 2 on node4, 4 on node5, but each node must have the "
    "same number; use --gpus-per-node=N, or --constraint",
    "--nodes=1 : --nodes=1": 'found a job of 2 components, but a run needs one; submit it without ":"',
}
PASSED_ON = {
    "--partition=large --constraint=large --nodes=1": "--nodes=1 --ntasks=4",
    "--partition=debug,large --nodes=2": "--nodes=2 --ntasks=4",
    "--partition=large --nodelist=node4,node5 --gpus-per-node=2": "--nodes=2 --ntasks=4",
    "--gpus=4": "--nodes=2 --ntasks=4",
    "--gres=gpu:1": "--nodes=2 --ntasks=2",
    "--gpus-per-node=1 --gres=gpu:2": "--nodes=2 --ntasks=4",
}


def test_what_nodes_can_not_share_alike_is_refused_and_not_rounded(slurm_cluster: Cluster, tmp_path: Path) -> None:
    with_site(tmp_path, 'srun() { echo "${*:1:2}"; }\n')
    script = str(tmp_path / "slurm/multinode.sh")
    ids = {}
    for options in (*REFUSED, *PASSED_ON):
        submitted = slurm_cluster.run("sbatch", "--parsable", *options.split(), script, cwd=tmp_path)
        assert submitted.returncode == 0, submitted.stderr
        ids[options] = Job(slurm_cluster, submitted.stdout.strip())
    for options, line in REFUSED.items():
        assert (ids[options].wait(), ids[options].details()["ExitCode"]) == ("FAILED", "2:0"), options
        assert ids[options].printed() == f"error: {line}\n", options
    for options, given in PASSED_ON.items():
        assert ids[options].wait() == "COMPLETED", options
        assert ids[options].printed() == f"{given}\n", options


def test_a_job_that_is_not_to_be_started_again_says_so(slurm_cluster: Cluster, tmp_path: Path) -> None:
    with_site(tmp_path, "srun() { return 3; }\n")
    job = submit(slurm_cluster, SLURM / "single.sh", cwd=tmp_path, gpus_per_node=0, no_requeue=True)
    assert (job.wait(), job.details()["ExitCode"]) == ("FAILED", "3:0")
    assert job.printed() == "failed with exit code 3: not requeued, because of --no-requeue\n"


def test_a_job_brings_its_tasks_an_environment_where_it_was_given_none(slurm_cluster: Cluster, tmp_path: Path) -> None:
    with_site(tmp_path, "unset HOME\npython=(sh -c 'echo \"$PYTHONPATH\"')\n")
    job = submit(slurm_cluster, SLURM / "single.sh", cwd=tmp_path, gpus_per_node=0, export="NONE")
    assert job.wait() == "COMPLETED", job.output()
    assert job.printed() == f"{tmp_path / 'src'}\n"


def test_a_copy_of_a_script_is_refused(slurm_cluster: Cluster, tmp_path: Path) -> None:
    copy = tmp_path / "mine.sh"
    copy.write_bytes((SLURM / "single.sh").read_bytes())
    job = submit(slurm_cluster, copy, cwd=tmp_path, gpus_per_node=0)
    assert (job.wait(), job.details()["ExitCode"]) == ("FAILED", "2:0")
    told = (tmp_path / f"slurm-{job.id}.out").read_text()
    assert told == (
        f"error: found no job.sh in {tmp_path}; submit the script inside its checkout, with sbatch "
        "CHECKOUT/slurm/NAME.sh\n"
    )
