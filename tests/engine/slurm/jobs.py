"""Jobs on a test cluster, submitted as a user does."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.engine.conftest import CHECKOUT, PLAIN
from tests.engine.slurm.cluster import Cluster

SLURM = CHECKOUT / "slurm"
RUN = (*PLAIN, "name=plain", "logger=csv", "~callbacks.lr_monitor")  # which needs another logger

TIMEOUT_SECONDS = 800  # bounds a hang
UNFINISHED = {"COMPLETING", "CONFIGURING", "PENDING", "REQUEUED", "RUNNING", "SIGNALING", "SUSPENDED"}


@dataclass(frozen=True)
class Job:
    cluster: Cluster
    id: str

    def details(self) -> dict[str, str]:
        """What scontrol shows: JobState, ExitCode, Restarts, NodeList, StdOut, …"""
        shown = self.cluster.run("scontrol", "--oneliner", "show", "job", self.id)
        return dict(re.findall(r"(\S+?)=(\S*)", shown.stdout))

    def wait(self, timeout_seconds: float = TIMEOUT_SECONDS) -> str:
        """The state in which the job ended; it is cancelled when that takes too long."""
        deadline = time.monotonic() + timeout_seconds
        while (state := self.details()["JobState"]) in UNFINISHED:
            if time.monotonic() > deadline:
                self.cluster.run("scancel", self.id)
                raise TimeoutError(f"job {self.id} is {state} after {timeout_seconds} s: {self.output()}")
            time.sleep(0.5)
        return state

    def until(self, is_so: Callable[[], object]) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not is_so():
            assert time.monotonic() < deadline, (self.details()["JobState"], self.output())
            time.sleep(0.2)

    def log(self) -> Path:
        """Where what it prints is: in the file of --output, or in that which its script has chosen and told."""
        shown = self.cluster.run("scontrol", "show", "job", self.id).stdout
        chosen = re.search(r"^ *Comment=log: (.*?) *$", shown, re.MULTILINE)
        return Path(chosen[1] if chosen else self.details()["StdOut"])

    def output(self) -> str:
        path = self.log()
        return path.read_text() if path.is_file() else ""

    def printed(self) -> str:
        """What it prints after the line that names its Python."""
        return re.sub(r"^python     .*\n", "", self.output(), count=1)


def submit(cluster: Cluster, script: Path, *arguments: str, cwd: Path, **options: str | int) -> Job:
    """Runs sbatch in `cwd`; ntasks_per_node=2 becomes --ntasks-per-node=2, and no_requeue=True --no-requeue.

    A checkout in `cwd` has the script of that name itself.
    """
    script = own if (own := cwd / "slurm" / script.name).exists() else script
    flags = [f"--{name.replace('_', '-')}{'' if value is True else f'={value}'}" for name, value in options.items()]
    submitted = cluster.run("sbatch", "--parsable", *flags, str(script), *arguments, cwd=cwd)
    assert submitted.returncode == 0, submitted.stderr
    return Job(cluster, submitted.stdout.strip().split(";")[0])


def with_site(folder: Path, settings: str) -> None:
    """Let jobs of a folder have a site's settings."""
    if (folder / "slurm").is_symlink():
        (folder / "slurm").unlink()
    (folder / "slurm").mkdir()
    for script in (path for path in SLURM.glob("*.sh") if path.stem != "site"):
        (folder / "slurm" / script.name).symlink_to(script)
    (folder / "slurm/site.sh").write_text(settings)
