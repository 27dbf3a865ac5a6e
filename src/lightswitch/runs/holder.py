"""The process that holds a lock: its identity across machines, and whether it is alive."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lightswitch import regular_files

_LARGEST_PID = 2**31 - 1  # that the kernel takes


@dataclass(frozen=True)
class Holder:
    """A process as a lock file names it.

    Args:
        host: its machine.
        pid: its process id.
        started: its start time on the kernel's clock, as process ids are reused.
        boot: the id of the machine's boot, new after each.
        namespace: the process id's namespace; each container has its own.
        since: the time of the lock, for people to read.
        directory: the run directory when it was locked.
        inode: of the lock file.
        starts: for each job whose launcher restarts its processes, the number of restarts so far.
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
        """Return whether the process is alive; None if this process can't know, as on another machine.

        Args:
            here: this process.
        """
        if (self.boot, self.namespace) != (here.boot, here.namespace):
            return None
        started = _start_time(self.pid)
        return None if started is None and _is_hidden(self.pid) else started == self.started

    def is_over_by(self, here: Holder) -> bool:
        """Return whether the holder's job has been restarted since, which ends all processes of earlier starts."""
        return any(count > self.starts[job] for job, count in here.starts.items() if job in self.starts)

    def holds(self, here: Holder) -> bool:
        """Return whether the lock is of this directory, and not copied with another."""
        return self.directory == here.directory or self.inode == here.inode


def parse(text: str) -> Holder | None:
    """Read a lock file's text; None if it is cut short or damaged: then the file's flock has to tell."""
    try:
        found = regular_files.as_record(regular_files.parse_json(text, "the lock"), Holder)
    except ValueError:
        return None
    return found if 0 < found.pid <= _LARGEST_PID else None


def this_process(run_dir: Path, descriptor: int, environ: Mapping[str, str]) -> Holder:
    """Return this process as the holder of a lock file, which it has opened as ``descriptor``."""
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
    """Return how often Slurm has restarted this job, and torchrun its processes, by the job's name."""
    found = {}
    if "SLURM_JOB_ID" in environ:
        found[f"Slurm job {environ['SLURM_JOB_ID']}"] = environ.get("SLURM_RESTART_COUNT", "0")
    if "TORCHELASTIC_RESTART_COUNT" in environ:
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
        found[f"torchrun {' '.join(environ.get(name, '') for name in names)}"] = environ["TORCHELASTIC_RESTART_COUNT"]
    return {job: int(count) for job, count in found.items() if count.isdecimal()}


def _start_time(pid: int) -> str | None:
    """Return the start time of a process; None if it does not exist, or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return _start_time_elsewhere(pid)
    return None if fields[0] in "ZX" else fields[19]


def _is_hidden(pid: int) -> bool:
    """Return whether a process exists that /proc hides, as another user's."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return False


def _start_time_elsewhere(pid: int) -> str | None:
    """Return the start time of a process on systems without /proc."""
    import psutil  # only here: it is slow to import

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
