"""Signals that ask a run to end: noted at any moment, obeyed where the run can end.

Slurm and submitit send SIGUSR1 or SIGUSR2 before a time limit, schedulers and torchrun SIGTERM, a terminal SIGINT. None
of them is acted on inside its handler: before and after training a run has nothing to lose and ends at once; while it
trains, they wait for the end of an optimizer step (lightswitch.fault_tolerance.preemption).
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

from lightswitch.cluster import placement, processes
from lightswitch.errors import Stopped
from lightswitch.fault_tolerance.failure import RanksFailed

REQUEUED = (signal.SIGUSR1, signal.SIGUSR2)  # what schedulers send ahead of a limit
CAUGHT = (*REQUEUED, signal.SIGTERM, signal.SIGINT)
_EXIT_CODES = {**dict.fromkeys(CAUGHT, 128 + signal.SIGTERM), signal.SIGINT: 128 + signal.SIGINT}
_PATIENCE_SECONDS = 5  # for a process to end by itself
_WORKER_SECONDS = 120  # that a loader worker outlives a SIGTERM: its rank reads on until the step is over

_received: signal.Signals | None = None
_deferred = False
_forwarding = False
_wakeup: socket.socket | None = None
_pid = 0


def catch() -> None:
    """From now on in this process. To be called in its main thread; a second time it does nothing."""
    global _pid
    if _pid == os.getpid():
        return
    _pid = os.getpid()
    for number in CAUGHT:
        if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:  # a shell's job in the background
            signal.signal(number, _note)
    _listen()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)  # job scripts block them: until here, they would kill


def received() -> signal.Signals | None:
    """The first signal that asked this process to end."""
    return _received


def behind(error: BaseException) -> Stopped | None:
    """What an error comes of, where this process or one that Python started for it was asked to end."""
    ended_with = error.exit_code if isinstance(error, RanksFailed) else None
    if _received is not None:
        return Stopped(_received)
    return next((Stopped(by) for by in CAUGHT[2:] if ended_with == _EXIT_CODES[by]), None)


def defer() -> None:
    """A signal waits until it is asked for by `received`."""
    global _deferred
    _deferred = True


def obey() -> None:
    """A signal ends the process at once, also one that was deferred.

    Raises:
        Stopped: there is one.
    """
    global _deferred
    _deferred = False
    if _received is not None:
        raise Stopped(_received)


def ignore() -> None:
    """What comes now comes too late: the exit code stays what it is."""
    if threading.current_thread() is threading.main_thread():
        for number in CAUGHT:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def forwarded_by(launcher: object) -> Iterator[None]:
    """Where Python starts the ranks and this process waits for them, signals are theirs meanwhile."""
    global _forwarding
    _forwarding = any(kind.__name__ == "_MultiProcessingLauncher" for kind in type(launcher).__mro__)
    try:
        yield
    finally:
        _forwarding = False


def _note(number: int, frame: FrameType | None) -> None:
    global _received
    if processes.have_failed.is_set():  # once a rank has ended, its launcher asks the others to
        return
    again = number == _received == signal.SIGINT  # Ctrl+C twice
    _received = _received or signal.Signals(number)
    for rank in processes.ranks:
        rank.terminate()
    if _forwarding:
        for process in multiprocessing.active_children():
            process.terminate()
    if again or not (_deferred or _forwarding):
        raise Stopped(_received)


def _listen() -> None:
    """A thread hears of signals also while the main thread waits in C, where no handler runs."""
    global _wakeup
    heard, _wakeup = socket.socketpair()
    _wakeup.setblocking(False)
    signal.set_wakeup_fd(_wakeup.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_enforce, args=(heard,), name="signals", daemon=True).start()


def _enforce(heard: socket.socket) -> None:
    interrupts = 0
    while numbers := heard.recv(64):
        interrupts += numbers.count(signal.SIGINT)
        asked = [number for number in numbers if number in CAUGHT]
        if asked and not processes.have_failed.is_set() and (interrupts > 1 or not (_deferred or _forwarding)):
            time.sleep(_PATIENCE_SECONDS)
            if (interrupts > 1 or not _deferred) and not processes.have_failed.is_set():
                by = _received or signal.Signals(asked[0])
                if placement.detect().rank == 0:
                    os.write(sys.stderr.fileno(), f"stopped    by {by.name}, at once\n".encode())
                processes.leave_now(_EXIT_CODES[by])


def _in_forked_child() -> None:
    global _deferred, _forwarding
    if _pid:
        _deferred = _forwarding = False
        signal.set_wakeup_fd(-1)
        for number in (*REQUEUED, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _read_on)


def _read_on(number: int, frame: FrameType | None) -> None:
    """Of a loader's worker: schedulers signal every process of a job, and its rank has a step to end."""
    data = sys.modules.get("torch.utils.data")
    if data is not None and data.get_worker_info() is not None:
        signal.alarm(_WORKER_SECONDS)
    else:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


os.register_at_fork(after_in_child=_in_forked_child)
