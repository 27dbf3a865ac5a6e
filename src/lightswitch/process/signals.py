"""Signals that ask a run to end: noted at any moment, and obeyed when the run can end.

Slurm and submitit send SIGUSR1 or SIGUSR2 before a time limit, schedulers and torchrun SIGTERM, a terminal SIGINT.
Before and after training a run has nothing to lose, and ends at once; while it trains, signals wait for the end of an
optimizer step (lightswitch.failures.preemption).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lightswitch.errors import Stopped
from lightswitch.process.state import Process

REQUEUED = (signal.SIGUSR1, signal.SIGUSR2)  # schedulers send them before a time limit
CAUGHT = (*REQUEUED, signal.SIGTERM, signal.SIGINT)
_PATIENCE_SECONDS = 5  # for a process to end by itself
_WORKER_SECONDS = 120  # that a loader worker outlives a SIGTERM: its rank reads on until the step is over


def ignore() -> None:
    """Ignore signals from now on: they come too late to change the exit code."""
    if threading.current_thread() is threading.main_thread():
        for number in CAUGHT:
            signal.signal(number, signal.SIG_IGN)


def stopped_with(exit_code: int | None) -> Stopped | None:
    """Return the `Stopped` of a process that a signal has ended with this exit code; None for any other code."""
    return next((stopped for stopped in map(Stopped, CAUGHT[2:]) if stopped.exit_code == exit_code), None)


class Signals:
    """The signals that one process has received. A copy that reaches another process is empty there.

    Attributes:
        received: the first signal that asked this process to end.
        is_first: whether this is rank 0, which reports for all ranks that a signal has ended them.
        is_deferred: whether all ranks agree on what they have received, before one of them ends by it.
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        self.received: signal.Signals | None = None
        self.is_first = False
        self.is_deferred = False
        self._is_forwarded = False
        self._pid = 0  # of the process that listens

    def __reduce__(self) -> tuple[Any, ...]:
        return Signals, (self.process,)

    def catch(self, is_first: bool) -> None:
        """Handle signals from now on; call it in the main thread. A second call only sets `is_first`.

        Args:
            is_first: see `Signals`.
        """
        self.is_first = is_first
        if self._pid == os.getpid():
            return
        if not self._pid:  # else it was inherited by a fork
            os.register_at_fork(after_in_child=self._in_forked_child)
        self._pid = os.getpid()
        for number in CAUGHT:
            if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:  # as in a shell's background job
                signal.signal(number, self._note)
        self._listen()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)  # job scripts block them: until here, they would kill

    def defer(self) -> None:
        """Let signals wait until a caller reads `received`."""
        self.is_deferred = True

    def obey(self) -> None:
        """Let signals end the process at once again, also one that was deferred.

        Raises:
            Stopped: a signal has been received.
        """
        self.is_deferred = False
        if self.received is not None:
            raise Stopped(self.received)

    @contextmanager
    def forwarded_by(self, launcher: object) -> Iterator[None]:
        """Pass signals on to the ranks meanwhile, if Python has spawned them and this process only waits for them."""
        self._is_forwarded = any(kind.__name__ == "_MultiProcessingLauncher" for kind in type(launcher).__mro__)
        try:
            yield
        finally:
            self._is_forwarded = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.process.has_failed.is_set():  # once a rank has ended, its launcher asks the others to
            return
        again = number == self.received == signal.SIGINT  # Ctrl+C twice
        self.received = self.received or signal.Signals(number)
        for rank in self.process.ranks:
            rank.terminate()
        if self._is_forwarded:
            for process in multiprocessing.active_children():
                process.terminate()
        if again or not (self.is_deferred or self._is_forwarded):
            raise Stopped(self.received)

    def _listen(self) -> None:
        """Start a thread that learns of signals while the main thread is in C code, where no handler runs."""
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
            if interrupts == 1 and self.is_deferred and self.is_first and sys.stderr.isatty():
                self._say("stopping   at the end of this step; Ctrl+C again stops at once")
            if asked and not failed.is_set() and (interrupts > 1 or not (self.is_deferred or self._is_forwarded)):
                time.sleep(_PATIENCE_SECONDS)
                if (interrupts > 1 or not self.is_deferred) and not failed.is_set():
                    by = self.received or signal.Signals(asked[0])
                    if self.is_first:
                        self._say(f"stopped    by {by.name}, at once")
                    self.process.leave_now(Stopped(by).exit_code)

    def _say(self, text: str) -> None:
        """Write a line while the main thread may be anywhere, also in a write of its own."""
        erasing = "\r\x1b[K" if sys.stderr.isatty() else ""  # of a progress bar that the cursor is behind
        os.write(sys.stderr.fileno(), f"{erasing}{text}\n".encode())

    def _in_forked_child(self) -> None:
        self.is_deferred = self._is_forwarded = False
        signal.set_wakeup_fd(-1)
        for number in (*REQUEUED, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _read_on)


def _read_on(number: int, frame: FrameType | None) -> None:
    """Let a loader worker read on after SIGTERM: schedulers signal all processes, and its rank has a step to finish."""
    data = sys.modules.get("torch.utils.data")
    if data is not None and data.get_worker_info() is not None:
        signal.alarm(_WORKER_SECONDS)
    else:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
