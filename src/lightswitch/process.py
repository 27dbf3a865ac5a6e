"""The current process: its mutable state, and the signals that end it.

Slurm sends SIGUSR1 or SIGUSR2 before a time limit, schedulers and torchrun SIGTERM, a terminal SIGINT, and
SIGHUP when it closes.
Before and after training, a run has nothing to lose and ends at once; during training, signals take effect at the end
of an optimizer step (lightswitch.failures.stopping).
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn, Protocol

from lightswitch.errors import ExitCode, Stopped
from lightswitch.monitoring.display import leave_terminal

_RANKS_PATIENCE_SECONDS = 10.0  # for ranks to end; those of a failed run write their reports
_FLUSH_SECONDS = 1.0  # for what is buffered in stdout and stderr, before this process exits at once
_GRACE_SECONDS = 20.0  # for a rank that gets SIGTERM: a step and a checkpoint
WITHOUT_MESSAGE = "ended without an error message: it was killed, or crashed outside of Python"


class WatchdogMember(Protocol):
    """This process's connection to the watchdog over the ranks."""

    def leave(self) -> None:
        """Wait for all ranks, and end the watchdog once the run is done."""

    def stop(self, stopped: Stopped) -> None:
        """End all ranks by the signal that ends this rank, which may be the only one that received it."""


class Process:
    """The state of one process, created once per process.

    Attributes:
        ranks: processes that this process has started; it is then rank 0 of its node.
        watchdog: the connection to the watchdog, once the ranks form a group; `is_watched` is set then.
        has_failed: set once the run has failed and all ranks know the failure; each ends with its exit code.
        steps_have_begun: set at the first step; a later error is a bug, not a problem of the request.
        meeting: at which the processes have agreed on the run's id, and where they meet again; None without one.
        refusal: why this start may not write its run directory; sent to the other ranks when they connect.
        locks: closed when this process ends, to release its locks on run directories.
        hosts: the host of each node, in the order of ranks, once the ranks have connected.
        crash_folder: the folder of this start's crash report, the same in all ranks once they have connected.
        decided: overrides that depend on this machine, passed to the ranks that this process starts.
        failure_file: the file from which the sweep that started this run reads its failure; None in any other run.
    """

    def __init__(self) -> None:
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.watchdog: WatchdogMember | None = None
        self.is_watched = threading.Event()
        self.has_failed = threading.Event()
        self.steps_have_begun = threading.Event()
        self.meeting: object | None = None
        self.refusal = ""
        self.locks = contextlib.ExitStack()
        self.hosts: list[str] = []
        self.crash_folder: Path | None = None
        self.failure_file: Path | None = None
        self.decided: list[str] = []

    def join_watchdog(self, watchdog: WatchdogMember) -> None:
        """Store the connection to the watchdog, which watches this process from now on."""
        self.watchdog = watchdog
        self.is_watched.set()

    def leave_watchdog(self) -> None:
        """Wait for all ranks and end the watchdog, if there is one: the run is done.

        Raises:
            Ended: the run has failed.
        """
        if self.watchdog is not None:
            self.watchdog.leave()
        self.watchdog = None
        self.is_watched.clear()

    def stop_all_ranks(self, stopped: Stopped) -> None:
        """Make the watchdog, if there is one, end the other ranks by the signal that ends this rank."""
        if self.watchdog is not None and not self.has_failed.is_set():
            self.watchdog.stop(stopped)

    def note_failure(self, line: str) -> None:
        """Write the run's first failure to `failure_file`."""
        if self.failure_file is not None:
            with contextlib.suppress(OSError), self.failure_file.open("x") as file:
                file.write(line)

    def how_ended(self, pid: int) -> str | None:
        """Return a text that says how a process of this machine ended; None while it runs, or where that is unknown."""
        for rank in self.ranks:
            if rank.pid == pid:  # a zombie's other threads may still run, and its exit code is known after the last
                code = rank.poll()
                return None if code is None else ended_by(code)
        return WITHOUT_MESSAGE if _has_ended(pid) else None

    def wait_for_ranks(self) -> None:
        """Wait 10 s for the ranks that this process started, then kill them."""
        end = time.monotonic() + _RANKS_PATIENCE_SECONDS
        for rank in self.ranks:
            try:
                rank.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.kill()

    def end_ranks(self) -> None:
        """End what this process started: its ranks, which have 10 s to end by themselves, and loader workers."""
        if threading.current_thread() is threading.main_thread():
            # torch's handler would raise that the workers below were killed
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.wait_for_ranks()
        for worker in multiprocessing.active_children():
            worker.kill()

    def leave_now(self, code: int) -> NoReturn:
        """Kill this process's children and exit at once, without an exception: the main thread may be in a collective
        that never returns."""
        try:
            import psutil  # slow to import

            children = [child.pid for child in psutil.Process().children(recursive=True)]
            for pid in children:  # all at once, or torch reports dead loader workers in the main thread
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.locks.close()
            flushing = threading.Thread(target=_flush, daemon=True)  # blocks if the reader of a pipe has stopped
            flushing.start()
            flushing.join(_FLUSH_SECONDS)
        finally:
            os._exit(code)

    def follow_parent(self, is_child: bool) -> None:
        """End this process when its parent has ended: a parent that is killed sends nothing.

        Args:
            is_child: whether rank 0 has started this rank, which would wait half an hour for it, and is followed until
                the watchdog takes over; otherwise torchrun or launch/spawn.py has, and this rank saves and ends.
        """
        parent = os.getppid()

        def follow() -> None:
            while os.getppid() == parent:
                time.sleep(1)
                if is_child and self.is_watched.is_set():
                    return
            if is_child:
                if os.environ["LOCAL_RANK"] == "1":  # one line for all ranks
                    line = f"process {parent}, which started the ranks of this node, was killed before training began"
                    print(line, file=sys.stderr, flush=True)
                self.leave_now(ExitCode.FAILED)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_GRACE_SECONDS)
            self.leave_now(ExitCode.STOPPED)

        threading.Thread(target=follow, name="follow parent", daemon=True).start()


def _has_ended(pid: int) -> bool:
    """Return whether a process of this machine has ended; False where that can't be known."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "Z"  # it has ended, and its parent has yet to see it
    except ProcessLookupError:
        return True
    except OSError:  # another user's, or a system without /proc
        return False


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader has ended, or it is closed
            stream.flush()


def ended_by(exit_code: int) -> str:
    """Return a text that says how a process ended. After a signal, `exit_code` is negative, as in subprocess."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    names = {one.value: one.name for one in signal.Signals}  # not every real-time signal has a name
    return f"was killed by {names.get(-exit_code, f'signal {-exit_code}')}"


def leave_group_at_exit() -> None:
    """Destroy the process group before Python exits.

    Lightning destroys only NCCL groups; gloo's threads, if left running, can abort a finished process as it exits.
    """
    atexit.register(_leave_group)


def _leave_group() -> None:
    for name in ("deepspeed.comm", "torch.distributed"):  # DeepSpeed has other groups beside the world's
        comm = sys.modules.get(name)
        if comm is not None and comm.is_available() and comm.is_initialized():
            comm.destroy_process_group()


REQUEUED = (signal.SIGUSR1, signal.SIGUSR2)  # schedulers send them before a time limit
_OF_A_TERMINAL = (signal.SIGINT, signal.SIGHUP)  # Ctrl+C, and its end, as when a connection breaks
CAUGHT = (*REQUEUED, signal.SIGTERM, *_OF_A_TERMINAL)
_PATIENCE_SECONDS = 5  # for a process to end by itself


def heard() -> list[signal.Signals]:
    """Return the signals that this process handles: not Ctrl+C in a shell's background job, nor SIGHUP after nohup."""
    return [one for one in CAUGHT if one not in _OF_A_TERMINAL or signal.getsignal(one) != signal.SIG_IGN]


def ignore_signals() -> None:
    """Ignore signals from now on: they come too late to change the exit code."""
    if threading.current_thread() is threading.main_thread():
        for number in CAUGHT:
            signal.signal(number, signal.SIG_IGN)


def stopped_with(exit_code: int | None) -> Stopped | None:
    """Return the `Stopped` with this exit code; None for a code that is not that of a signal."""
    return next((stopped for stopped in map(Stopped, CAUGHT[2:]) if stopped.exit_code == exit_code), None)


class Signals:
    """The signals that one process has received.

    Args:
        requeue: takes how this process ends by a signal, whether to ask the scheduler to start the job again if the
            signal was its notice, and whether training had begun; returns the exception with which to exit.

    Attributes:
        received: the first signal that requested the end of this process.
        is_first: whether this is rank 0, which reports for all ranks that a signal has ended them.
        is_deferred: whether a signal waits until all ranks have agreed on it, instead of ending this process at once.
    """

    def __init__(self, process: Process, requeue: Callable[[Stopped, bool, bool], Stopped] | None = None) -> None:
        self.process = process
        self._requeue = requeue
        self._has_requeued = False
        self._has_trained = False
        self.received: signal.Signals | None = None
        self.is_first = False
        self.is_deferred = False
        self._is_told = False
        self._pid = 0  # of the process that listens

    def catch(self, is_first: bool) -> None:
        """Handle signals from now on. Call it in the main thread; a second call only sets `is_first`.

        Args:
            is_first: see `Signals`.
        """
        self.is_first = is_first
        if self._pid == os.getpid():
            return
        if not self._pid:  # else it was inherited by a fork
            os.register_at_fork(after_in_child=self._in_forked_child)
        self._pid = os.getpid()
        for number in heard():
            signal.signal(number, self._note)
        self._listen()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)  # job scripts block them, as they would kill earlier

    def defer(self) -> None:
        """Defer signals: from now on they only set `received`, which the caller has to read."""
        self.is_deferred = self._has_trained = True

    def obey(self) -> None:
        """Stop deferring signals: they end the process at once again, including one already deferred.

        Raises:
            Stopped: a signal has been received.
        """
        self.is_deferred = False
        if self.received is not None:
            raise Stopped(self.received)

    def note_told(self) -> None:
        """Note that a line has said by which signal the run ends, so that none says it again."""
        self._is_told = True

    def end_by(self, stopped: Stopped) -> Stopped:
        """Return the exception with which this process ends by a signal, its own or another rank's.

        Rank 0 requeues the job, also if it ends without raising it. May be called in any thread, and several times.
        """
        is_asking, self._has_requeued = self.is_first and not self._has_requeued, True
        return stopped if self._requeue is None else self._requeue(stopped, is_asking, self._has_trained)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        if self.process.has_failed.is_set():  # once a rank has ended, its launcher signals the others
            return
        again = number == self.received == signal.SIGINT  # Ctrl+C twice
        self.received = self.received or signal.Signals(number)
        for rank in self.process.ranks:
            rank.terminate()
        if again or not self.is_deferred:
            raise Stopped(self.received)

    def _listen(self) -> None:
        """Start a thread that receives signals while the main thread is in C code, where no handler runs."""
        heard, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._enforce, args=(heard,), name="signals", daemon=True).start()

    def _enforce(self, heard: socket.socket) -> None:
        interrupts = 0
        failed = self.process.has_failed
        while numbers := heard.recv(64):
            interrupts += numbers.count(signal.SIGINT)
            asked = [number for number in numbers if number in CAUGHT]
            is_answered = interrupts != 1 or signal.SIGINT not in numbers  # a launcher sends SIGTERM after Ctrl+C
            if not is_answered and self.is_deferred and self.is_first and sys.stderr.isatty():
                self._say("stopping   at the end of this step; Ctrl+C again stops at once")
            if asked and not failed.is_set() and (interrupts > 1 or not self.is_deferred):
                time.sleep(_PATIENCE_SECONDS)
                if (interrupts > 1 or not self.is_deferred) and not failed.is_set():
                    by = self.received or signal.Signals(asked[0])
                    if self.is_first and not self._is_told:
                        self._say(f"stopped    by {by.name}, at once")
                    self.process.leave_now(self.end_by(Stopped(by)).exit_code)

    def _say(self, text: str) -> None:
        """Write a line to stderr without Python's buffers, as the main thread may be in a write of its own."""
        erasing = "\r\x1b[K" if sys.stderr.isatty() else ""  # erases a progress bar on the cursor's line
        os.write(sys.stderr.fileno(), f"{erasing}{text}\n".encode())

    def _in_forked_child(self) -> None:
        """Let a child end by SIGTERM, and go on after the other signals, which a terminal or Slurm sends to all.

        These have a handler, because a program that the child executes would go on to ignore an ignored signal.
        """
        self.is_deferred = False
        signal.set_wakeup_fd(-1)
        for number in heard():
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else lambda *_: None)
