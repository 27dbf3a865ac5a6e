"""Who writes a run directory: one start of one run at a time, on whatever machine.

The lock is a file in the directory. It names its holder, which keeps it locked (flock) while it lives. The kernel ends
the flock of a process that dies, and sees all processes of its machine, those in containers, too. A file system that
several machines share need not pass an flock on: there the holder's heartbeat tells, as it touches the file.
"""

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

from lightswitch.refused import Refused

log = logging.getLogger(__name__)

FILE = ".lock"
_BEAT_SECONDS = 10.0
_SILENT_SECONDS = 60.0  # without a heartbeat, a holder on another machine is dead
_SETTLE_SECONDS = 2.0  # after which two that took it at once, where flock is not handed on, know which one has it
_PATIENCE_SECONDS = 30.0  # for what a dead holder has forked: a rank that ends its step, a loader's worker
_POLL_SECONDS = 0.1


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


class Lock:
    """Held from `take` to `release`, or to the end of the process and of those it has forked."""

    def __init__(self, path: Path, descriptor: int, text: str, on_lost: Callable[[str], None]) -> None:
        self.path = path
        self.descriptor = descriptor
        self._text = text
        self._pid = os.getpid()
        self._on_lost = on_lost
        self._released = threading.Event()
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def release(self) -> None:
        if self._released.is_set() or self._pid != os.getpid():  # a process that was forked is not the holder
            return
        self._released.set()
        with contextlib.suppress(OSError):
            if self.path.read_text() == self._text:
                self.path.unlink()
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)  # also for what this process has forked
        os.close(self.descriptor)

    def _beat(self) -> None:
        """A process that stood still may have been taken for dead: then another has the directory by now."""
        pause_seconds = _SETTLE_SECONDS
        while not self._released.wait(pause_seconds):
            pause_seconds = _BEAT_SECONDS
            with contextlib.suppress(OSError):  # a file system that is away for a while
                text = self.path.read_text()
                if text != self._text and (other := _parsed(text)) is not None:
                    self._on_lost(f"{other} has taken the run directory over, and this process ends")
                    return
                os.utime(self.path)


def take(run_dir: Path, on_lost: Callable[[str], None], environ: Mapping[str, str] = os.environ) -> Lock:
    """
    Args:
        on_lost: called with a line, beside the main thread, once another process has the lock.

    Raises:
        Refused: another process has the lock, or the file can't be written.
    """
    try:
        return _take(run_dir, on_lost, environ)
    except OSError as error:
        raise Refused(f"{_shown(run_dir)} can't be written: {error.strerror or error}") from error


def _take(run_dir: Path, on_lost: Callable[[str], None], environ: Mapping[str, str]) -> Lock:
    path, end = run_dir / FILE, time.monotonic() + _PATIENCE_SECONDS
    silences, told = 0, False
    while True:
        with contextlib.ExitStack() as closing:
            descriptor = _opened(path)
            closing.callback(os.close, descriptor)
            is_free, here = _flock(descriptor), _here(run_dir, descriptor, environ)
            other = _parsed(os.pread(descriptor, 1 << 16, 0).decode(errors="replace"))
            if other is not None and not other.holds(here):
                other = None
            verdict = _verdict(other, here, is_free, path)
            if verdict == "wait" and not told and other is not None:
                told = True
                log.info("waiting    for what is left of %s", other)
            if verdict == "lives" or (verdict == "wait" and time.monotonic() > end):
                raise Refused(_refusal(run_dir, other, waited=verdict == "wait"))
            if not _is_at(descriptor, path):  # it was removed meanwhile, by the holder's end or in the next lines
                continue
            if verdict == "dead" and is_free is not False:
                text = _write(path, descriptor, here)
                closing.pop_all()
                return Lock(path, descriptor, text, on_lost)
            if verdict == "dead":
                # the server keeps the lock of a machine that is gone; or another start is just taking it: look again
                silences += 1
                if silences > 1:
                    path.unlink(missing_ok=True)
        time.sleep(_SETTLE_SECONDS if silences else _POLL_SECONDS)


def _verdict(other: Holder | None, here: Holder, is_free: bool | None, path: Path) -> str:
    """Whether the holder lives, is dead, or may be known soon ("wait").

    Args:
        is_free: the flock; None where the file system has none.
    """
    if other is None:  # nobody's; or its holder is about to write it
        return "wait" if is_free is False else "dead"
    lives = other.lives(here)
    if lives:
        return "lives"
    is_over = lives is False or other.is_over_by(here)
    if other.boot == here.boot and is_free is not None:
        if is_free:
            return "dead"
        return "wait" if is_over else "lives"  # for what the dead process has forked
    if is_over:
        return "dead"
    return "dead" if _is_silent(path, other) else "lives"


def _refusal(run_dir: Path, other: Holder | None, waited: bool) -> str:
    who = str(other) if other is not None else "a process that does not say which it is"
    still = "what is left of " if waited and other is not None else ""
    return (
        f"{_shown(run_dir)} is being written by {still}{who}; wait until it has ended, or give this run another run_id"
    )


def _is_silent(path: Path, other: Holder) -> bool:
    """Wait until a heartbeat comes, or has not come for too long. By the file system's clock, the same for all."""
    try:
        beat, start = _beat_of(path), time.monotonic()
        with tempfile.TemporaryFile(dir=path.parent) as now:
            silent_seconds = os.fstat(now.fileno()).st_mtime - beat
        if silent_seconds < _SILENT_SECONDS:
            log.info("waiting    for %.0f s at most, to see whether %s lives", _SILENT_SECONDS - silent_seconds, other)
        while silent_seconds + time.monotonic() - start < _SILENT_SECONDS:
            time.sleep(_POLL_SECONDS)
            if _beat_of(path) != beat:
                return False
    except FileNotFoundError:  # it has ended
        pass
    return True


def _beat_of(path: Path) -> float:
    """Opened anew each time: NFS asks the server then, and not what it remembers."""
    with path.open() as file:
        return os.fstat(file.fileno()).st_mtime


def _opened(path: Path) -> int:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another start was refused, and has removed an empty directory
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


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


def _write(path: Path, descriptor: int, holder: Holder) -> str:
    text = json.dumps(asdict(holder), indent=2) + "\n"
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
        os.fsync(descriptor)  # where another machine sees it, too
    except OSError:  # a full disk
        path.unlink(missing_ok=True)
        raise
    return text


def _parsed(text: str) -> Holder | None:
    """None of a file that was cut short: its holder can't be told, and its flock tells enough."""
    try:
        return Holder(**json.loads(text))
    except (ValueError, TypeError):
        return None


def _here(run_dir: Path, descriptor: int, environ: Mapping[str, str]) -> Holder:
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
        starts=_starts(environ),
    )


def _starts(environ: Mapping[str, str]) -> dict[str, int]:
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


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
