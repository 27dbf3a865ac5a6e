"""The state of a process that changes while it runs, in one object that is passed down."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn, Protocol

from lightswitch.errors import ExitCode, Stopped

_PATIENCE_SECONDS = 10.0  # for ranks of a failed run, which write what they know of it
_GRACE_SECONDS = 20.0  # for a rank that is asked to end: a step and a checkpoint


class WatchdogMember(Protocol):
    """This process's connection to the watchdog over the ranks."""

    def leave(self) -> None:
        """End the watchdog with all ranks, once the run is done."""

    def stop(self, stopped: Stopped) -> None:
        """Have all ranks end as this one does, by a signal that it alone may have received."""


class Lock(Protocol):
    """A hold on a directory, which other processes respect."""

    descriptor: int

    def release(self) -> None:
        """Release the lock; a second time does nothing."""


class Process:
    """The state of one process, made once in it. A copy that reaches another process starts anew there.

    Attributes:
        ranks: processes that this one has started; it is then rank 0 of its node.
        watchdog: the connection to it, once the ranks form a group; `is_watched` is set then.
        has_failed: set once the run has failed, and all ranks know how; each ends with that exit code.
        steps_have_begun: set at the first step; a later error is a bug, not a problem of the request.
        refusal: why this start may not write its run directory; the other ranks learn it when they connect.
        locks: on run directories, released when this process ends.
        hosts: the machine of each rank, once they have connected.
        crash_folder: of this start's crash report, the same in all ranks once they have connected.
        disk_error: what a library's thread could not write; the run has failed by it.
        decided: overrides that follow from this machine, and that the ranks which this process starts are given.
        failure_file: where the sweep that has started this run reads its failure; None in any other run.
    """

    def __init__(self) -> None:
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.watchdog: WatchdogMember | None = None
        self.is_watched = threading.Event()
        self.has_failed = threading.Event()
        self.steps_have_begun = threading.Event()
        self.refusal = ""
        self.locks: list[Lock] = []
        self.hosts: list[str] = []
        self.crash_folder: Path | None = None
        self.failure_file: Path | None = None
        self.disk_error: BaseException | None = None
        self.decided: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"crash_folder": self.crash_folder, "failure_file": self.failure_file}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Process.__init__(self)
        self.__dict__.update(state)

    def join_watchdog(self, watchdog: WatchdogMember) -> None:
        """Keep the connection to the watchdog, which watches this process from now on."""
        self.watchdog = watchdog
        self.is_watched.set()

    def leave_watchdog(self) -> None:
        """Wait for all ranks, if there is a watchdog, and end it: the run is done.

        Raises:
            Ended: the run has failed.
        """
        if self.watchdog is not None:
            self.watchdog.leave()
        self._forget_watchdog()

    def raise_disk_error(self) -> None:
        """Raise `disk_error`, if there is one that the main thread has not met."""
        if self.disk_error is not None:
            raise self.disk_error

    def stop_all_ranks(self, stopped: Stopped) -> None:
        """Have the watchdog, if there is one, end the other ranks as this one is ended."""
        if self.watchdog is not None and not self.has_failed.is_set():
            self.watchdog.stop(stopped)

    def _forget_watchdog(self) -> None:
        self.watchdog = None
        self.is_watched.clear()

    def note_failure(self, line: str) -> None:
        """Write the run's first failure to the file that its sweep reads."""
        if self.failure_file is not None:
            with contextlib.suppress(OSError), self.failure_file.open("x") as file:
                file.write(line)

    def release_locks(self) -> None:
        """Release the locks on run directories."""
        while self.locks:
            self.locks.pop().release()

    def how_ended(self, pid: int) -> str | None:
        """Return how one of `ranks` ended, in words; None while it runs, and for any other process."""
        code = next((rank.poll() for rank in self.ranks if rank.pid == pid), None)
        return None if code is None else ended_by(code)

    def end_ranks(self) -> None:
        """Wait 10 s for the ranks that this process started, then kill them."""
        if threading.current_thread() is threading.main_thread():
            # torch's handler would raise that the workers below were killed
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end = time.monotonic() + _PATIENCE_SECONDS
        for rank in self.ranks:
            try:
                rank.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.kill()
        for worker in multiprocessing.active_children():
            worker.kill()

    def leave_now(self, code: int) -> NoReturn:
        """End this process and its children at once, not by an exception: the main thread may be in a collective that
        never returns."""
        import psutil  # at the end alone: it takes its time to import

        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        children = [child.pid for child in psutil.Process().children(recursive=True)]
        for pid in children:  # all at once, or torch reports dead loader workers in the main thread
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.release_locks()
        os._exit(code)

    def follow_parent(self) -> None:
        """End this rank when its parent has ended, until the watchdog does that.

        The rank would wait for its parent for half an hour.
        """
        parent = os.getppid()

        def follow() -> None:
            while not self.is_watched.wait(1):
                if os.getppid() != parent:
                    if os.environ["LOCAL_RANK"] == "1":  # one line for all ranks
                        line = f"rank 0 failed: process {parent} was killed before it trained"
                        print(line, file=sys.stderr, flush=True)
                    self.leave_now(ExitCode.FAILED)

        threading.Thread(target=follow, name="follow parent", daemon=True).start()

    def end_with_parent(self) -> None:
        """End this rank, which Python or torchrun has started, when its parent has ended.

        Python's sends it SIGINT then, and a job in the background ignores that. One of torchrun's that was killed sends
        nothing, and the others can't meet while its rank trains on.
        """
        parent = os.getppid()

        def follow() -> None:
            while os.getppid() == parent:
                time.sleep(1)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_GRACE_SECONDS)
            self.leave_now(ExitCode.STOPPED)

        threading.Thread(target=follow, name="follow parent", daemon=True).start()


def ended_by(exit_code: int) -> str:
    """Return how a process ended, in words; the exit code of one that a signal killed is negative, as in subprocess."""
    return f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"


def leave_group_at_exit() -> None:
    """Have the process group ended before Python exits.

    Lightning ends NCCL groups only; the threads of gloo, left running, can abort a finished process as it exits.
    """
    atexit.register(_leave_group)


def _leave_group() -> None:
    for name in ("deepspeed.comm", "torch.distributed"):  # DeepSpeed keeps groups of its own beside the world's
        comm = sys.modules.get(name)
        if comm is not None and comm.is_available() and comm.is_initialized():
            comm.destroy_process_group()
