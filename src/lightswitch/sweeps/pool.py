"""The processes of a sweep's jobs: as many at once as there are slots, each job in a session of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from lightswitch.errors import ExitCode
from lightswitch.process import CAUGHT, REQUEUED, heard

_ENOUGH = 3  # interrupts until SIGKILL; the run saves at the first and ends without saving at the second
_LOOK_EVERY_SECONDS = 0.2
_GRACE_SECONDS = 10


End = Callable[[int, list[int]], None]  # takes the exit code (the negative signal number if killed) and the signals


@dataclass
class _Job:
    process: subprocess.Popen[bytes]
    slot: Mapping[str, str]
    is_lost: Callable[[], bool]
    end: End
    signals: list[int] = field(default_factory=list)  # that arrived while it ran
    lost_at: float | None = None


class Pool:
    """The processes of jobs, and the slots in which they run.

    Slurm and the terminal signal only this process, which forwards the signals: SIGINT to all processes of each job, as
    a terminal does, others to the first. What a job leaves behind is killed at its end.

    Args:
        slots: environment variables of each slot, such as CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, slots: Sequence[Mapping[str, str]] = ({},)) -> None:
        self.slots = slots
        self._free = list(slots)
        self._running: list[_Job] = []
        self._wakeup = -1
        self._before: dict[signal.Signals, Any] = {}
        self._exit_code: int | None = None

    @property
    def is_shared(self) -> bool:
        """True if several jobs run at once."""
        return len(self.slots) > 1

    def __enter__(self) -> Self:
        self._wakeup = signal.set_wakeup_fd(-1)  # else its reader would end this process before its jobs
        self._before = {number: signal.signal(number, self._forward) for number in heard()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._running:  # an error here, or a job's own, ends no other job
            self._look()
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def start(
        self,
        command: Sequence[str],
        cwd: Path,
        end: End,
        output: Path | None = None,
        is_lost: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start a command in a new session, in the slot that `wait(for_slot=True)` has waited for.

        Args:
            end: called at its end.
            output: file for what it prints; None for the streams of this process.
            is_lost: returns whether the command can no longer succeed and must be killed.
        """
        # the run inherits the mask, and unblocks what it handles
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)
        try:
            with contextlib.ExitStack() as files:
                stream = files.enter_context(output.open("ab")) if output is not None else None
                process = subprocess.Popen(
                    command,
                    cwd=cwd,
                    env={**os.environ, **self._free[-1]},
                    start_new_session=True,
                    stdout=stream,
                    stderr=stream,
                )
            self._running.append(_Job(process, self._free.pop(), is_lost, end))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def wait(self, for_slot: bool = False) -> None:
        """Wait until all jobs have ended, or until a slot is free.

        Raises:
            SystemExit: a signal has ended the sweep.
        """
        while len(self._running) > (len(self.slots) - 1 if for_slot and self._exit_code is None else 0):
            self._look()
        if self._exit_code is not None:
            raise SystemExit(self._exit_code)

    def stop(self, exit_code: int) -> None:
        """Let no other job start: the sweep ends with this code once those that are running have ended."""
        self._exit_code = exit_code

    def _look(self) -> None:
        ended = [job for job in self._running if job.process.poll() is not None]
        for job in ended:
            _signal_all(job.process, signal.SIGKILL)
            self._running.remove(job)
            self._free.append(job.slot)
            job.end(job.process.returncode, job.signals)
        for job in self._running:
            if job.lost_at is None and job.is_lost():
                job.lost_at = time.monotonic()
            elif job.lost_at is not None and time.monotonic() > job.lost_at + _GRACE_SECONDS:
                _signal_all(job.process, signal.SIGKILL)
        if not ended:
            time.sleep(_LOOK_EVERY_SECONDS)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if number not in REQUEUED:  # a notice of a time limit ends the sweep only with a job that it has stopped
            self.stop(ExitCode.of_signal(number))
        for job in self._running:
            job.signals.append(number)
            if number == signal.SIGINT:
                _signal_all(job.process, signal.SIGKILL if job.signals.count(number) >= _ENOUGH else number)
            else:
                job.process.send_signal(number)


def _signal_all(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
