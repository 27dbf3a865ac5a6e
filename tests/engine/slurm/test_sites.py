"""What clusters are like: shared nodes, checkouts that nobody may write, several Pythons, nodes that differ."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engine.slurm import jobs
from tests.engine.slurm.cluster import Cluster
from tests.engine.slurm.jobs import SLURM, Job, submit, with_site

pytestmark = pytest.mark.slurm

SITES: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "sites.yaml").read_text())


@pytest.fixture(scope="module")
def submitted(slurm_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Job, Path]]:
    """The jobs of sites.yaml, all submitted at once, each in a checkout of its own."""
    found = {}
    for name, row in SITES.items():
        folder = tmp_path_factory.mktemp("site")
        for there in ("mine/bin", ".venv/bin"):
            (folder / there).mkdir(parents=True)
            (folder / there / "python").symlink_to(sys.executable)
        with_site(folder, row.get("site", "").replace("FOLDER", str(folder)))
        (folder / "train.py").write_text(row.get("train", ""))
        asked = row.get("sbatch", "").replace("FOLDER", str(folder)).split()
        script = folder / "slurm" / row.get("script", "single.sh")
        done = slurm_cluster.run("sbatch", "--parsable", *asked, str(script), *row.get("words", ()), cwd=folder)
        assert done.returncode == 0, (name, done.stderr)
        found[name] = Job(slurm_cluster, done.stdout.strip() + ("_1" if "--array=1" in asked else "")), folder
    return found


@pytest.mark.parametrize("name", SITES)
def test_a_job_takes_what_sbatch_and_its_site_ask_for(name: str, submitted: dict[str, tuple[Job, Path]]) -> None:
    row, (job, folder) = SITES[name], submitted[name]
    expected = {
        "ends": row.get("ends", "COMPLETED 0:0"),
        "log": row.get("log", "FOLDER/runs"),
        "printed": row["printed"],
    }
    state, details = job.wait(), job.details()
    found = {"ends": f"{state} {details['ExitCode']}", "log": str(job.log().parent), "printed": job.printed()}
    assert {key: text.replace(str(folder), "FOLDER") for key, text in found.items()} == expected, details["Command"]
    if "python" in row:
        assert job.output().startswith(f"python     {row['python']}\n".replace("FOLDER", str(folder)))


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


@pytest.mark.nightly
def test_where_no_run_can_be_written_a_line_says_what_to_do(
    slurm_cluster: Cluster, read_only: Path, tmp_path: Path
) -> None:
    options = {"gpus_per_node": 0, "export": f"ALL,HOME={tmp_path}"}
    job = submit(slurm_cluster, SLURM / "single.sh", *jobs.RUN, cwd=read_only, **options)
    assert (job.wait(), job.details()["ExitCode"]) == ("FAILED", "2:0"), job.output()
    assert job.log() == tmp_path / f"slurm-{job.id}.out"
    line = r"error: the run directory can't be made: \[Errno 30\] Read-only file system: 'runs\S*'; type hydra.run.dir="
    assert re.search(line, job.output())  # a checkout in which someone has trained has the folder


# in the place of srun: the command that it would start; and an administrator's modules, which read what nobody has set
SITE = """
srun() { while [[ $1 == --* ]]; do shift; done; shift 3; echo "$*"; }
module() {
  [[ "$*" == "load python/3.12 cuda" && -z $NOT_SET ]] || return 1
  PATH=$HOME/modules:$PATH
}
PATH=$PATH:$HOME/modules
workdir=$checkout/scratch
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
        with_site(checkout, SITE + line)
        options = {"gpus_per_node": 0, "export": f"ALL,VIRTUAL_ENV=,CONDA_PREFIX=,HOME={tmp_path}"}
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


def test_a_copy_of_a_script_is_refused(slurm_cluster: Cluster, tmp_path: Path) -> None:
    copy = tmp_path / "mine.sh"
    copy.write_bytes((SLURM / "single.sh").read_bytes())
    job = submit(slurm_cluster, copy, cwd=tmp_path, gpus_per_node=0)
    assert (job.wait(), job.details()["ExitCode"]) == ("FAILED", "2:0")
    assert (tmp_path / f"slurm-{job.id}.out").read_text() == (
        f"error: found no job.sh in {tmp_path}; submit the script inside its checkout, with sbatch "
        "CHECKOUT/slurm/NAME.sh\n"
    )
