"""A process that holds a lock: told apart from every other, on any machine, and known to live or not."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Holder:
    """
    Args:
        started: by the kernel's clock, since a process id is used again.
        boot: of the machine, another one after each start of it.
        namespace: in which the process id counts; containers have one each.
        since: for people.
        starts: of a launcher's job that starts its processes again, how often it has.
    """

    host: str
    pid: int
    started: str
    boot: str
    namespace: str
    since: str
    directory: str
    inode: int
    starts: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    def lives(self, here: Holder) -> bool | None:
        """None where that is not to be seen from here."""
        if (self.boot, self.namespace) != (here.boot, here.namespace):
            return None
        started = _start_time(self.pid)
        return None if started is None and _is_hidden(self.pid) else started == self.started

    def is_over_by(self, here: Holder) -> bool:
        """A job that was started again has ended the processes that it had before, on whichever node."""
        return any(count > self.starts[job] for job, count in here.starts.items() if job in self.starts)

    def holds(self, here: Holder) -> bool:
        """Not where the directory was copied, lock and all."""
        return self.directory == here.directory or self.inode == here.inode


def parsed(text: str) -> Holder | None:
    """None of a file that was cut short: its holder can't be told, and its flock tells enough."""
    try:
        return Holder(**json.loads(text))
    except (ValueError, TypeError):
        return None


def here(run_dir: Path, descriptor: int, environ: Mapping[str, str]) -> Holder:
    pid = os.getpid()
    return Holder(
        host=platform.node(),
        pid=pid,
        started=_start_time(pid) or "",
        boot=_boot(),
        namespace=_namespace(),
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
        directory=str(run_dir.resolve()),
        inode=os.fstat(descriptor).st_ino,
        starts=starts_of(environ),
    )


def starts_of(environ: Mapping[str, str]) -> dict[str, int]:
    """Slurm numbers the starts of a job, and torchrun those of its processes, whose store stays where it is."""
    found = {}
    if "SLURM_JOB_ID" in environ:
        found[f"Slurm job {environ['SLURM_JOB_ID']}"] = environ.get("SLURM_RESTART_COUNT", "0")
    if "TORCHELASTIC_RESTART_COUNT" in environ:
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
        found[f"torchrun {' '.join(environ.get(name, '') for name in names)}"] = environ["TORCHELASTIC_RESTART_COUNT"]
    return {job: int(count) for job, count in found.items() if count.isdecimal()}


def _start_time(pid: int) -> str | None:
    """None of a process that is not there, or has ended and waits for its parent to look."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return _start_time_elsewhere(pid)
    return None if fields[0] in "ZX" else fields[19]


def _is_hidden(pid: int) -> bool:
    """It is another user's, where /proc shows each user their own processes alone."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return False


def _start_time_elsewhere(pid: int) -> str | None:
    """On systems without /proc."""
    import psutil  # here alone: it takes its time to import

    try:
        return str(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import psutil

        return f"{platform.node()} {psutil.boot_time():.0f}"


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
