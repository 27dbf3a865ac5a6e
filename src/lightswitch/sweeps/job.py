"""The jobs of a sweep: each an ordinary run in a process and session of its own, as many at once as there are slots."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Self

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightswitch.config.confidential import masked_override
from lightswitch.config.overrides import flags_of_a_job, quoted, typed_overrides
from lightswitch.errors import ExitCode, RefusedRequest, shown
from lightswitch.monitoring.objective import find
from lightswitch.process import CAUGHT, REQUEUED, heard
from lightswitch.runs import resume
from lightswitch.sweeps import record
from lightswitch.sweeps.record import FAILED, FINISHED, STOPPED, Record

_OF_THE_SWEEP = re.compile(r"[+~]*hydra[./](mode|run|sweep|sweeper|launcher)\b")
_OUTPUT = "output.txt"
FAILURE = "failure.txt"  # of the run's directory: its failure
_LOOK_EVERY_SECONDS = 0.2

End = Callable[[int, list[int]], None]  # takes the exit code (the negative signal number if killed) and the signals


def run(typed: list[str], cfg: DictConfig, pool: Pool) -> None:
    """Start one job once a slot is free. Hydra calls this for each job.

    Args:
        typed: script and arguments of the sweep.

    Raises:
        RefusedRequest: the directory belongs to another job, whose checkpoints this job must not reuse.
        SystemExit: a signal stopped the job, or any signal but the notice of a time limit arrived; this ends the sweep.
    """
    pool.wait(for_slot=True)
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    directory = shown(folder)
    overrides = typed_overrides(hydra)
    job = Record(hydra.job.num, [masked_override(override) for override in overrides], directory)
    earlier = record.read(folder)
    if earlier is not None and (other := earlier.of_another_job(job.overrides)):
        raise RefusedRequest([f"{directory} belongs to the job with {other}; start this sweep under another run_id"])
    if earlier is not None and (earlier.state, earlier.overrides) == (FINISHED, job.overrides):
        print(f"job {job.number:<6} has already finished", flush=True)
        return
    script, *arguments = typed
    kept = [override for override in hydra.overrides.hydra if not _OF_THE_SWEEP.match(override)]
    own = [*flags_of_a_job(arguments), *kept, "hydra.mode=RUN", f"hydra.run.dir={quoted(directory)}"]
    own.append(f"hydra.job.num={job.number}")  # the run detects by this that it is a job
    record.write(job, folder)
    chosen = (override for override in job.overrides if override not in typed and not override.startswith("~"))
    print(f"job {job.number:<6} {' '.join(chosen)}", flush=True)
    (folder / FAILURE).unlink(missing_ok=True)
    pool.start(
        [sys.executable, script, *own, *overrides],
        Path(hydra.runtime.cwd),
        partial(_end, job, folder, str(cfg.objective), pool),
        folder / _OUTPUT if pool.is_shared else None,
    )


def _end(job: Record, folder: Path, objective: str, pool: Pool, exit_code: int, signals: list[int]) -> None:
    """Write the job's record, and stop the sweep if a signal ended the job."""
    failure = folder / FAILURE
    if exit_code == 0:
        found = resume.read_results(folder)
        job = replace(job, state=FINISHED, objective=found.get(find(found, objective) or objective))
    elif signals:
        job = replace(job, state=STOPPED)
    else:
        error = failure.read_text(errors="replace").partition("\n")[0] if failure.exists() else ""
        how = f"exit code {exit_code}" if exit_code > 0 else f"killed by {signal.Signals(-exit_code).name}"
        job = replace(job, state=FAILED, error=error or how)
    failure.unlink(missing_ok=True)
    record.write(job, folder)
    if pool.is_shared:
        value = "" if job.objective is None else f", {objective} {job.objective:.5g}"
        print(f"job {job.number:<6} {job.state}{value}; its output: {job.directory}/{_OUTPUT}", flush=True)
    if job.state == STOPPED or set(signals) - set(REQUEUED):  # a time-limit notice ends only the job
        pool.stop(exit_code if exit_code > 0 else ExitCode.of_signal(signals[0]))


@dataclass
class _JobProcess:
    process: subprocess.Popen[bytes]
    slot: Mapping[str, str]
    end: End
    signals: list[int] = field(default_factory=list)  # that arrived while it ran

    def signal_all(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Pool:
    """The processes of jobs, and the slots in which they run.

    Slurm and the terminal signal only this process, which forwards the signals: SIGINT to all processes of each job, as
    a terminal does, others to the first. What a job leaves behind is killed at its end.

    Args:
        slots: environment variables of each slot, such as CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, slots: Sequence[Mapping[str, str]] = ({},)) -> None:
        self.is_shared = len(slots) > 1
        self._free = list(slots)
        self._running: list[_JobProcess] = []
        self._exit_code: int | None = None

    def __enter__(self) -> Self:
        self._wakeup = signal.set_wakeup_fd(-1)  # else its reader would end this process before its jobs
        self._before = {number: signal.signal(number, self._forward) for number in heard()}
        return self

    def __exit__(self, *_: object) -> None:
        while self._running:  # an error here, or a job's own, ends no other job
            self._look()
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def start(self, command: Sequence[str], cwd: Path, end: End, output: Path | None = None) -> None:
        """Start a command in a new session, in the slot that `wait(for_slot=True)` has waited for.

        Args:
            end: called at its end.
            output: file for what it prints; None for the streams of this process.
        """
        # the run inherits the mask, and unblocks what it handles
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)
        try:
            with output.open("ab") if output is not None else contextlib.nullcontext() as stream:
                environment = {**os.environ, **self._free[-1]}
                process = subprocess.Popen(
                    command, cwd=cwd, env=environment, start_new_session=True, stdout=stream, stderr=stream
                )
            self._running.append(_JobProcess(process, self._free.pop(), end))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def wait(self, for_slot: bool = False) -> None:
        """Wait until all jobs have ended, or until a slot is free.

        Raises:
            SystemExit: a signal has ended the sweep.
        """
        while self._running and not (for_slot and self._free and self._exit_code is None):
            self._look()
        if self._exit_code is not None:
            raise SystemExit(self._exit_code)

    def stop(self, exit_code: int) -> None:
        """Let no other job start: the sweep ends with this code once those that are running have ended."""
        self._exit_code = exit_code

    def _look(self) -> None:
        ended = [job for job in self._running if job.process.poll() is not None]
        for job in ended:
            job.signal_all(signal.SIGKILL)
            self._running.remove(job)
            self._free.append(job.slot)
            job.end(job.process.returncode, job.signals)
        if not ended:
            time.sleep(_LOOK_EVERY_SECONDS)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if number not in REQUEUED:  # a notice of a time limit ends the sweep only with a job that it has stopped
            self.stop(ExitCode.of_signal(number))
        for job in self._running:
            job.signals.append(number)
            if number == signal.SIGINT:
                job.signal_all(number)
            else:
                job.process.send_signal(number)
