"""The lock of a run directory: one start of one run writes there at a time, on any machine.

The lock is a file in the directory that names its holder, which keeps it locked (flock) while it lives. The kernel
releases the flock of a process that dies, in containers as well. A shared file system need not pass an flock on to
other machines: there the holder's heartbeat counts, by which it touches the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from lightswitch import regular_files
from lightswitch.errors import IrregularFile, Refused, shown
from lightswitch.runs import holder
from lightswitch.runs.holder import Holder

log = logging.getLogger(__name__)

FILE = ".lock"
_BEAT_SECONDS = 10.0
_SILENT_SECONDS = 60.0  # without a heartbeat, a holder on another machine is dead
_SETTLE_SECONDS = 2.0  # without flock, two processes that took it at once know after this time which one has it
_PATIENCE_SECONDS = 30.0  # for children of a dead holder: a rank that finishes its step, a loader worker
_POLL_SECONDS = 0.1


class Lock:
    """A lock, held from `take` to `release`, or until the process and all that it has forked have ended."""

    def __init__(self, path: Path, descriptor: int, text: str, on_lost: Callable[[str], None]) -> None:
        self.path = path
        self.descriptor = descriptor
        self._text = text
        self._pid = os.getpid()
        self._on_lost = on_lost
        self._released = threading.Event()
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def release(self) -> None:
        """Release the lock; a second time, and in a forked process, this does nothing."""
        if self._released.is_set() or self._pid != os.getpid():  # a forked process is not the holder
            return
        self._released.set()
        with contextlib.suppress(OSError, ValueError):
            if regular_files.read_text(self.path) == self._text:
                self.path.unlink()
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)  # also for forked processes
        os.close(self.descriptor)

    def _beat(self) -> None:
        """Touch the lock file, until another process has it: one that was suspended may have been taken for dead."""
        pause_seconds = _SETTLE_SECONDS
        while not self._released.wait(pause_seconds):
            pause_seconds = _BEAT_SECONDS
            with contextlib.suppress(OSError, ValueError):  # a file system that is away for a while
                text = regular_files.read_text(self.path)
                if text != self._text and (other := holder.parse(text)) is not None:
                    self._on_lost(f"{other} has taken the run directory over, and this process ends")
                    return
                os.utime(self.path, follow_symlinks=False)


def take(run_dir: Path, on_lost: Callable[[str], None], environ: Mapping[str, str] = os.environ) -> Lock:
    """Take the lock of a directory, and wait for what remains of a dead holder.

    Args:
        on_lost: called with a line, in another thread, if another process takes the lock over.

    Raises:
        Refused: another process has the lock, or the file can't be written, or is a link.
    """
    try:
        return _take(run_dir, on_lost, environ)
    except IrregularFile:
        raise
    except OSError as error:
        raise Refused(f"{shown(run_dir)} can't be written: {error.strerror or error}") from error


def _take(run_dir: Path, on_lost: Callable[[str], None], environ: Mapping[str, str]) -> Lock:
    path, end = run_dir / FILE, time.monotonic() + _PATIENCE_SECONDS
    silences, told = 0, False
    while True:
        with contextlib.ExitStack() as closing:
            descriptor = _opened(path)
            closing.callback(os.close, descriptor)
            is_free, here = _flock(descriptor), holder.this_process(run_dir, descriptor, environ)
            other = holder.parse(os.pread(descriptor, 1 << 16, 0).decode(errors="replace"))
            if other is not None and not other.holds(here):
                other = None
            verdict = _verdict(other, here, is_free, path)
            if verdict == "wait" and not told and other is not None:
                told = True
                log.info("waiting    for what is left of %s", other)
            if verdict == "lives" or (verdict == "wait" and time.monotonic() > end):
                raise Refused(_refusal(run_dir, other, waited=verdict == "wait"))
            if not _is_at(descriptor, path):  # it was removed meanwhile, by its holder or by the lines below
                continue
            if verdict == "dead" and is_free is not False:
                text = _write(path, descriptor, here)
                closing.pop_all()
                return Lock(path, descriptor, text, on_lost)
            if verdict == "dead":
                # a server keeps the flock of a machine that is gone, or another start is just taking it: look again
                silences += 1
                if silences > 1:
                    path.unlink(missing_ok=True)
        time.sleep(_SETTLE_SECONDS if silences else _POLL_SECONDS)


def _verdict(other: Holder | None, here: Holder, is_free: bool | None, path: Path) -> str:
    """Return whether the holder "lives", is "dead", or will be known soon ("wait").

    Args:
        is_free: whether the flock is free; None if the file system has none.
    """
    if other is None:  # unlocked; or its holder is about to write it
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
    who = str(other) if other is not None else "an unknown process"
    still = "what is left of " if waited and other is not None else ""
    return (
        f"{shown(run_dir)} is being written by {still}{who}; wait until it has ended, or give this run another run_id"
    )


def _is_silent(path: Path, other: Holder) -> bool:
    """Wait for a heartbeat, and return whether none came in time, by the file system's clock, the same for all."""
    try:
        beat, start = _beat_of(path), time.monotonic()
        with tempfile.TemporaryFile(dir=path.parent) as now:
            silent_seconds = max(0.0, os.fstat(now.fileno()).st_mtime - beat)  # a clock may have been set back since
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
    """Return the time of the last heartbeat. Opening the file makes NFS ask the server, not its cache."""
    with regular_files.check(path).open() as file:
        return os.fstat(file.fileno()).st_mtime


def _opened(path: Path) -> int:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another start, refused, has removed the empty directory
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
        os.fsync(descriptor)  # where another machine sees it, too
    except OSError:  # a full disk
        path.unlink(missing_ok=True)
        raise
    return text
