"""Run one job of a sweep: an ordinary run in its own process session."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightswitch.cluster.placement import Placement
from lightswitch.config.confidential import masked_override
from lightswitch.config.overrides import flags_of_a_job, quoted, typed_overrides
from lightswitch.errors import ExitCode, RefusedRequest
from lightswitch.monitoring.objective import find
from lightswitch.process import CAUGHT, REQUEUED, heard
from lightswitch.runs import finished
from lightswitch.sweeps import record
from lightswitch.sweeps.record import FAILED, FINISHED, STOPPED, Record

_OF_THE_SWEEP = re.compile(r"[+~]*hydra[./](mode|run|sweep|sweeper|launcher)\b")
_ENOUGH = 3  # interrupts until SIGKILL; the run saves at the first and ends without saving at the second
_LOOK_EVERY_SECONDS = 1
_GRACE_SECONDS = 10


def run(typed: list[str], cfg: DictConfig, placement: Placement) -> float | None:
    """Run one job. Hydra calls this for each job, in this process or in each task of a cluster job.

    Args:
        typed: script and arguments of the sweep; those of this process differ in a cluster job.

    Returns:
        The objective, for Optuna; None if the job failed or did not log it. The sweep continues in either case.

    Raises:
        RefusedRequest: the directory belongs to another job, whose checkpoints this job must not reuse.
        SystemExit: a signal stopped the job, or any signal but the notice of a time limit arrived; this ends the sweep.
    """
    hydra = HydraConfig.get()
    folder, cwd = Path(hydra.runtime.output_dir), Path(hydra.runtime.cwd)
    directory = str(folder.relative_to(cwd)) if folder.is_relative_to(cwd) else str(folder)
    overrides = typed_overrides(hydra)
    shown = [masked_override(override) for override in overrides]
    job = Record(hydra.job.num, shown, directory, start=start_id(placement))
    earlier = record.read(folder)
    if record.is_damaged(folder):
        print(f"{directory}/job.json can't be read; the job is treated as unfinished", flush=True)
    if earlier is not None and (other := earlier.of_another_job(job.overrides)):
        raise RefusedRequest([f"{directory} belongs to the job with {other}; start this sweep under another run_id"])
    if (
        earlier is not None
        and earlier.state == FINISHED
        and earlier.overrides == job.overrides
        and (cfg.resume != "never" or _are_of_one_job(earlier.start, job.start))
    ):
        print(f"job {job.number:<6} has already finished", flush=True)
        return earlier.objective if earlier.is_comparable else None
    script, *arguments = typed
    kept = [override for override in hydra.overrides.hydra if not _OF_THE_SWEEP.match(override)]
    own = [*flags_of_a_job(arguments), *kept, "hydra.mode=RUN", f"hydra.run.dir={quoted(directory)}"]
    own.append(f"hydra.job.num={job.number}")  # the run detects by this that it is a job
    if placement.rank == 0:
        record.write(job, folder)
        chosen = (override for override in job.overrides if override not in typed and not override.startswith("~"))
        print(f"job {job.number:<6} {' '.join(chosen)}", flush=True)
    return _run([sys.executable, script, *own, *overrides], cwd, job, folder, str(cfg.objective), placement)


def _are_of_one_job(one: str, other: str) -> bool:
    """Return whether two starts are of the same cluster job, which was requeued in between."""
    return one.partition(".")[0] == other.partition(".")[0] != ""


def start_id(placement: Placement, environ: Mapping[str, str] = os.environ) -> str:
    """Return an id of the current start of a job, equal in all its tasks and different in every other start.

    The text before the first period is the cluster job's id; it is empty outside of Slurm. A job without other tasks
    has no variable that differs between two starts in one allocation, so its id ends in random digits.
    """
    job, restarts, step = (environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID"))
    return f"{job}.{restarts}.{step}" if placement.is_external else f"{job}.{secrets.token_hex(4)}"


def _run(
    command: list[str], cwd: Path, job: Record, folder: Path, objective: str, placement: Placement
) -> float | None:
    failure = failure_file(folder, placement)
    failure.unlink(missing_ok=True)
    ended = run_to_its_end(command, cwd, is_lost=_failure_elsewhere(job, folder, placement.is_external))
    if ended.exit_code == 0:
        found = finished.read_results(folder)
        job = replace(job, state=FINISHED, objective=found.get(find(found, objective) or objective))
    elif ended.signals:
        job = replace(job, state=STOPPED)
    else:
        job = replace(job, state=FAILED, error=_read(failure) or _how(ended.exit_code))
    failure.unlink(missing_ok=True)
    value = _end(job, folder, placement.rank)
    if job.state == STOPPED or set(ended.signals) - set(REQUEUED):  # a time-limit notice ends only the job
        code = ended.exit_code if ended.exit_code > 0 else ExitCode.of_signal(ended.signals[0])
        raise SystemExit(code)
    return value


def failure_file(folder: Path, placement: Placement) -> Path:
    """Return the file to which a job's process writes its failure, one for each task of a cluster job."""
    return folder / f"failure_{placement.rank}.txt"


def _read(failure: Path) -> str | None:
    return failure.read_text(errors="replace").partition("\n")[0] if failure.exists() else None


def _failure_elsewhere(job: Record, folder: Path, has_tasks: bool) -> Callable[[], bool]:
    """Return a function that returns whether another task of the job has failed, for which this task would wait."""

    def failed() -> bool:
        there = record.read(folder) if has_tasks else None
        return there is not None and (there.start, there.state) == (job.start, FAILED)

    return failed


def _how(exit_code: int) -> str:
    return f"exit code {exit_code}" if exit_code > 0 else f"killed by {signal.Signals(-exit_code).name}"


def _end(job: Record, folder: Path, rank: int) -> float | None:
    """Write the job's record if this task is the first one or failed, and return the objective for Optuna."""
    if rank == 0 or job.state == FAILED:
        record.write(job, folder)
    return job.objective if job.is_comparable else None


@dataclass(frozen=True)
class ProcessEnd:
    """End of a job's process.

    Args:
        exit_code: exit code; the negative signal number if a signal killed the process.
        signals: signals received while it ran.
    """

    exit_code: int
    signals: list[int]


def run_to_its_end(command: list[str], cwd: Path, is_lost: Callable[[], bool]) -> ProcessEnd:
    """Run a command in a new session, and kill any processes that it leaves behind.

    Slurm and the terminal signal only this process, which forwards the signals.

    Args:
        is_lost: returns whether the command can no longer succeed and must be killed; called every second.
    """
    with _started(command, cwd) as (child, signals):
        exit_code = _wait(child, is_lost)
    _signal_all(child, signal.SIGKILL)
    return ProcessEnd(exit_code, signals)


@contextlib.contextmanager
def _started(command: list[str], cwd: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Start the command; forward SIGINT to all of its processes, as a terminal does, and other signals to the first."""
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number != signal.SIGINT:
            child.send_signal(number)
        else:
            _signal_all(child, signal.SIGKILL if received.count(number) >= _ENOUGH else number)

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)  # the run inherits the mask and unblocks what it handles
    child = subprocess.Popen(command, cwd=cwd, start_new_session=True)
    wakeup = signal.set_wakeup_fd(-1)  # else its reader would end this process before its child
    before = {number: signal.signal(number, pass_on) for number in heard()}
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
