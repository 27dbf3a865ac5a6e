"""Lock of a run directory: one start of one run writes there at a time, on any machine. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lightswitch import regular_files
from lightswitch.cluster import placement
from lightswitch.errors import IrregularFile, Refused, shown

log = logging.getLogger(__name__)

FILE = ".lock"
_ASKED = ".lock.asked"  # exists while the holder is requested to end
_BEAT_SECONDS = 10.0
_SILENT_SECONDS = 60.0  # without a heartbeat, after which a holder on another machine counts as dead
_SETTLE_SECONDS = 2.0  # without flock, two processes that took the lock at once know after this time which one has it
_PATIENCE_SECONDS = 30.0  # to wait for children of a dead holder: a rank that finishes its step, a loader worker
_POLL_SECONDS = 0.1
_LARGEST_PID = 2**31 - 1  # that the kernel accepts


class Lock:
    """Lock that is held from `take` to `release`, or until the process and all of its forked processes have ended."""

    def __init__(
        self, path: Path, descriptor: int, text: str, on_lost: Callable[[str], None], on_asked: Callable[[], None]
    ) -> None:
        self.path = path
        self.descriptor = descriptor
        self._text = text
        self._pid = os.getpid()
        self._on_lost = on_lost
        self._on_asked = on_asked
        self._released = threading.Event()
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def release(self) -> None:
        """Release the lock. A second call, or a call in a forked process, does nothing."""
        if self._released.is_set() or self._pid != os.getpid():  # a forked process is not the holder
            return
        self._released.set()
        with contextlib.suppress(OSError, ValueError):
            if regular_files.read_text(self.path) == self._text:
                self.path.unlink()
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)  # also for forked processes
        os.close(self.descriptor)

    def _beat(self) -> None:
        """Touch the lock file until another process takes it, as it may if this one was suspended and seemed dead."""
        pause_seconds = _SETTLE_SECONDS
        while not self._released.wait(pause_seconds):
            pause_seconds = _BEAT_SECONDS
            with contextlib.suppress(OSError, ValueError):  # the file system may be unavailable for a while
                if is_removed(self.path.parent) and not self._released.is_set():  # by `release`, in this moment
                    self._on_lost(removed(self.path.parent))
                    return
                text = regular_files.read_text(self.path)
                if text != self._text and (other := parse(text)) is not None:
                    self._on_lost(f"{other} has taken over the run directory, so this process ends")
                    return
                os.utime(self.path, follow_symlinks=False)
                self.path.with_name(_ASKED).unlink()  # raises unless another process has requested the end
                self._on_asked()


def is_removed(run_dir: Path) -> bool:
    """Return whether the directory of a run in progress was removed; a logger may have made an empty one since."""
    return not any((run_dir / name).exists() for name in (FILE, "config.yaml"))


def removed(run_dir: Path) -> str:
    """Return the line that ends a run whose directory was removed."""
    return f"{shown(run_dir)} was removed while the run wrote to it; start the run again"


def take(
    run_dir: Path,
    on_lost: Callable[[str], None],
    on_asked: Callable[[], None] = lambda: None,
    environ: Mapping[str, str] = os.environ,
) -> Lock:
    """Take the lock of a directory, and wait for remaining processes of a dead holder.

    Args:
        on_lost: called with a message, in another thread, if another process takes the lock over.
        on_asked: called in another thread if a node of the same elastic torchrun finds the lock taken: its agents lost
            contact and formed two groups. They rendezvous again once this process has ended.

    Raises:
        Refused: another process has the lock, or the file can't be written, or is a link.
    """
    try:
        return _take(run_dir, on_lost, on_asked, environ)
    except IrregularFile:
        raise
    except OSError as error:
        raise Refused(f"{shown(run_dir)} can't be written: {error.strerror or error}") from error


def _take(
    run_dir: Path, on_lost: Callable[[str], None], on_asked: Callable[[], None], environ: Mapping[str, str]
) -> Lock:
    path, end = run_dir / FILE, time.monotonic() + _PATIENCE_SECONDS
    silences, is_reported = 0, False
    while True:
        with contextlib.ExitStack() as closing:
            descriptor = _opened(path)
            closing.callback(os.close, descriptor)
            is_free, here = _flock(descriptor), this_process(run_dir, descriptor, environ)
            other = parse(os.pread(descriptor, 1 << 16, 0).decode(errors="replace"))
            if other is not None and not other.holds(here):
                other = None
            verdict = _verdict(other, here, is_free, path)
            if verdict == "wait" and not is_reported and other is not None:
                is_reported = True
                log.info("waiting    for remaining child processes of %s", other)
            if verdict == "lives" and other is not None and other.group and other.group == here.group:
                path.with_name(_ASKED).touch()
                raise Refused(
                    f"{shown(run_dir)} is being written by {other}, from the same torchrun job; "
                    "the nodes will rendezvous again"
                )
            if verdict == "lives" or (verdict == "wait" and time.monotonic() > end):
                raise Refused(_refusal(run_dir, other, waited=verdict == "wait"))
            if not _is_at(descriptor, path):  # it was removed in the meantime, by its holder or by the lines below
                continue
            if verdict == "dead" and is_free is not False:
                text = _write(path, descriptor, here)
                path.with_name(_ASKED).unlink(missing_ok=True)  # request to the previous holder
                closing.pop_all()
                return Lock(path, descriptor, text, on_lost, on_asked)
            if verdict == "dead":
                # a server still holds the flock of a dead machine, or another start is taking the lock: check again
                silences += 1
                if silences > 1:
                    path.unlink(missing_ok=True)
        time.sleep(_SETTLE_SECONDS if silences else _POLL_SECONDS)


def _verdict(other: Holder | None, here: Holder, is_free: bool | None, path: Path) -> str:
    """Return whether the holder "lives" or is "dead"; "wait" while its text is missing or its children still run.

    Args:
        is_free: whether the flock is free; None if the file system has none.
    """
    if other is None:  # unlocked, or the holder is about to write the text
        return "wait" if is_free is False else "dead"
    lives = other.lives(here)
    if lives:
        return "lives"
    is_over = lives is False or other.is_over_by(here)
    if other.boot == here.boot and is_free is not None:
        if is_free:
            return "dead"
        return "wait" if is_over else "lives"  # for processes that the dead one has forked
    if is_over:
        return "dead"
    return "dead" if _is_silent(path, other) else "lives"


def _refusal(run_dir: Path, other: Holder | None, waited: bool) -> str:
    who = str(other) if other is not None else "an unknown process"
    still = "a remaining child process of " if waited and other is not None else ""
    return (
        f"{shown(run_dir)} is being written by {still}{who}; wait until it has ended, or give this run another run_id"
    )


def _is_silent(path: Path, other: Holder) -> bool:
    """Wait for a heartbeat; return whether none came in time, by the file system's clock, which all machines share."""
    try:
        beat, start = _beat_of(path), time.monotonic()
        with tempfile.TemporaryFile(dir=path.parent) as now:
            silent_seconds = max(0.0, os.fstat(now.fileno()).st_mtime - beat)  # a clock may have been set back since
        if silent_seconds < _SILENT_SECONDS:
            log.info(
                "waiting    for %.0f s at most, to see whether %s is alive", _SILENT_SECONDS - silent_seconds, other
            )
        while silent_seconds + time.monotonic() - start < _SILENT_SECONDS:
            time.sleep(_POLL_SECONDS)
            if _beat_of(path) != beat:
                return False
    except FileNotFoundError:  # the holder has ended
        pass
    return True


def _beat_of(path: Path) -> float:
    """Return the time of the last heartbeat. Opening the file makes NFS query the server instead of its cache."""
    with regular_files.check(path).open() as file:
        return os.fstat(file.fileno()).st_mtime


def _opened(path: Path) -> int:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another start that was refused has removed the empty directory
            return regular_files.open_own(path, os.O_RDWR | os.O_CREAT)


def _flock(descriptor: int) -> bool | None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        return None
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _write(path: Path, descriptor: int, here: Holder) -> str:
    text = json.dumps(asdict(here), indent=2) + "\n"
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
        os.fsync(descriptor)  # so that another machine sees it, too
    except OSError:  # a full disk
        path.unlink(missing_ok=True)
        raise
    return text


@dataclass(frozen=True)
class Holder:
    """Process that a lock file names.

    Args:
        host: its machine.
        pid: its process id.
        started: its start time on the kernel's clock, because process ids are reused.
        boot: id of the machine's boot, new after each boot.
        namespace: namespace of the process id; each container has its own.
        since: time at which the lock was taken, for people to read.
        directory: the run directory when it was locked.
        inode: inode of the lock file.
        starts: number of restarts so far, for each job whose launcher restarts its processes.
        group: rendezvous of its elastic torchrun's agents; empty for any other process.
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
    group: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    def lives(self, here: Holder) -> bool | None:
        """Return whether the process is alive; None if this process can't know, for example on another machine.

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
        """Return whether the lock belongs to this directory, and was not copied with another one."""
        return self.directory == here.directory or self.inode == here.inode


def parse(text: str) -> Holder | None:
    """Parse a lock file's text; return None if it is truncated or damaged, so that the file's flock decides."""
    try:
        found = regular_files.as_record(regular_files.parse_json(text, "the lock"), Holder)
    except ValueError:
        return None
    return found if 0 < found.pid <= _LARGEST_PID else None


def this_process(run_dir: Path, descriptor: int, environ: Mapping[str, str]) -> Holder:
    """Return this process as the holder of a lock file that it has opened as ``descriptor``."""
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
        group=placement.elastic_group(environ),
    )


def starts_of(environ: Mapping[str, str]) -> dict[str, int]:
    """Return how often Slurm has restarted this job, and torchrun its processes, by job name."""
    found = {}
    if "SLURM_JOB_ID" in environ:
        found[f"Slurm job {environ['SLURM_JOB_ID']}"] = environ.get("SLURM_RESTART_COUNT", "0")
    if "TORCHELASTIC_RESTART_COUNT" in environ:
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
        found[f"torchrun {' '.join(environ.get(name, '') for name in names)}"] = environ["TORCHELASTIC_RESTART_COUNT"]
    return {job: int(count) for job, count in found.items() if count.isdecimal()}


def _start_time(pid: int) -> str | None:
    """Return the start time of a process; None if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return _start_time_elsewhere(pid)
    return None if fields[0] in "ZX" else fields[19]


def _is_hidden(pid: int) -> bool:
    """Return whether a process exists but is hidden in /proc, for example another user's."""
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
