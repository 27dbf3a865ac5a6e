"""The process that a job of a sweep runs in, and what it may start in turn."""

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

_ENOUGH = 3  # interrupts: the first two are the run's own, to save and to end without it
_LOOK_EVERY_SECONDS = 1
_GRACE_SECONDS = 10


@dataclass(frozen=True)
class ProcessEnd:
    exit_code: int  # of a process that a signal has killed, the negative of its number
    signals: list[int]  # that came while it ran


def run_to_its_end(command: list[str], cwd: Path, is_lost: Callable[[], bool]) -> ProcessEnd:
    """Runs in a session of its own, so that nothing of it is left when it has ended.

    Slurm and the terminal reach this process alone: it hands their signals on.

    Args:
        is_lost: whether it is of no use any more and is to be ended; asked every second.
    """
    with _started(command, cwd) as (child, signals):
        exit_code = _wait(child, is_lost)
    _signal_all(child, signal.SIGKILL)
    return ProcessEnd(exit_code, signals)


@contextlib.contextmanager
def _started(command: list[str], cwd: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """An interrupt goes to all of its processes, as from a terminal, and the others to the first, as from Slurm."""
    received: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number != signal.SIGINT:
            child.send_signal(number)
        else:
            _signal_all(child, signal.SIGKILL if received.count(number) >= _ENOUGH else number)

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)  # the run inherits it, and unblocks what it can answer
    child = subprocess.Popen(command, cwd=cwd, start_new_session=True)
    wakeup = signal.set_wakeup_fd(-1)  # what listens there would end this process before its child
    before = {number: signal.signal(number, hand_on) for number in (*CAUGHT, signal.SIGHUP)}
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
