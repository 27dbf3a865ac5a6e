"""The process that a job of a sweep runs in, with all processes that it starts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from lightswitch.process.signals import CAUGHT

_ENOUGH = 3  # interrupts: the first two are for the run, to save, and to end without saving
_LOOK_EVERY_SECONDS = 1
_GRACE_SECONDS = 10


@dataclass(frozen=True)
class ProcessEnd:
    """The end of a job's process.

    Args:
        exit_code: of a process that a signal has killed, the negative of its number.
        signals: those received while it ran.
    """

    exit_code: int
    signals: list[int]


def run_to_its_end(command: list[str], cwd: Path, is_lost: Callable[[], bool]) -> ProcessEnd:
    """Run a command in a session of its own, so that no process of it is left when it has ended.

    Slurm and the terminal signal only this process, which passes their signals on.

    Args:
        is_lost: returns whether the command can no longer succeed and is to be ended; called every second.
    """
    with _started(command, cwd) as (child, signals):
        exit_code = _wait(child, is_lost)
    _signal_all(child, signal.SIGKILL)
    return ProcessEnd(exit_code, signals)


@contextlib.contextmanager
def _started(command: list[str], cwd: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Start the command, and pass on SIGINT to all of its processes, as a terminal does, other signals to the first."""
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number != signal.SIGINT:
            child.send_signal(number)
        else:
            _signal_all(child, signal.SIGKILL if received.count(number) >= _ENOUGH else number)

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)  # the run inherits it, and unblocks what it handles
    child = subprocess.Popen(command, cwd=cwd, start_new_session=True)
    wakeup = signal.set_wakeup_fd(-1)  # its reader would end this process before its child
    before = {number: signal.signal(number, pass_on) for number in (*CAUGHT, signal.SIGHUP)}
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        yield child, received
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(child: subprocess.Popen[bytes], is_lost: Callable[[], bool]) -> int:
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(_LOOK_EVERY_SECONDS)
        if is_lost():
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(_GRACE_SECONDS)
            _signal_all(child, signal.SIGKILL)


def _signal_all(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)
