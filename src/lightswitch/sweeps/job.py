"""One job of a sweep: an ordinary run in a process of its own."""

from __future__ import annotations

import os
import re
import secrets
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightswitch.cluster.placement import Placement
from lightswitch.config.confidential import masked_override
from lightswitch.config.overrides import flags_of_a_job, quoted, typed_overrides
from lightswitch.errors import ExitCode, RefusedRequest
from lightswitch.monitoring.objective import find
from lightswitch.process import REQUEUED
from lightswitch.runs import resume
from lightswitch.sweeps import record
from lightswitch.sweeps.pool import Pool
from lightswitch.sweeps.record import FAILED, FINISHED, STOPPED, Record

_OF_THE_SWEEP = re.compile(r"[+~]*hydra[./](mode|run|sweep|sweeper|launcher)\b")
_OUTPUT = "output.txt"


def run(typed: list[str], cfg: DictConfig, placement: Placement, pool: Pool) -> float | None:
    """Start one job, and wait for its end unless several run at once.

    Hydra calls this for each job, in this process or in each task of a cluster job.

    Args:
        typed: script and arguments of the sweep; those of this process differ in a cluster job.

    Returns:
        The objective, for Optuna; None if the job failed, did not log it, or still runs. The sweep continues in each
        case.

    Raises:
        RefusedRequest: the directory belongs to another job, whose checkpoints this job must not reuse.
        SystemExit: a signal stopped the job, or any signal but the notice of a time limit arrived; this ends the sweep.
    """
    pool.wait(for_slot=True)
    hydra = HydraConfig.get()
    folder, cwd = Path(hydra.runtime.output_dir), Path(hydra.runtime.cwd)
    directory = str(folder.relative_to(cwd)) if folder.is_relative_to(cwd) else str(folder)
    overrides = typed_overrides(hydra)
    shown = [masked_override(override) for override in overrides]
    job = Record(hydra.job.num, shown, directory, start=start_id(placement))
    earlier = record.read(folder)
    if earlier is not None and (other := earlier.of_another_job(job.overrides)):
        raise RefusedRequest([f"{directory} belongs to the job with {other}; start this sweep under another run_id"])
    if earlier is not None and (earlier.state, earlier.overrides) == (FINISHED, job.overrides):
        is_requeued = earlier.start.partition(".")[0] == job.start.partition(".")[0] != ""
        if cfg.resume != "never" or is_requeued:
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
    failure_file(folder, placement).unlink(missing_ok=True)
    pool.start(
        [sys.executable, script, *own, *overrides],
        cwd,
        partial(_end, job, folder, str(cfg.objective), placement, pool),
        folder / _OUTPUT if pool.is_shared else None,
        partial(_has_failed_elsewhere, job, folder) if placement.is_external else lambda: False,
    )
    if pool.is_shared:
        return None
    pool.wait()
    return ended.objective if (ended := record.read(folder)) is not None and ended.is_comparable else None


def start_id(placement: Placement, environ: Mapping[str, str] = os.environ) -> str:
    """Return an id of the current start of a job, equal in all its tasks and different in every other start.

    The text before the first period is the cluster job's id; it is empty outside of Slurm. A job without other tasks
    has no variable that differs between two starts in one allocation, so its id ends in random digits.
    """
    job, restarts, step = (environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID"))
    return f"{job}.{restarts}.{step}" if placement.is_external else f"{job}.{secrets.token_hex(4)}"


def _end(
    job: Record, folder: Path, objective: str, placement: Placement, pool: Pool, exit_code: int, signals: list[int]
) -> None:
    """Write the job's record if this task is the first one or failed, and stop the sweep if a signal ended the job."""
    failure = failure_file(folder, placement)
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
    if placement.rank == 0 or job.state == FAILED:
        record.write(job, folder)
    if pool.is_shared:
        value = "" if job.objective is None else f", {objective} {job.objective:.5g}"
        print(f"job {job.number:<6} {job.state}{value}; its output: {job.directory}/{_OUTPUT}", flush=True)
    if job.state == STOPPED or set(signals) - set(REQUEUED):  # a time-limit notice ends only the job
        pool.stop(exit_code if exit_code > 0 else ExitCode.of_signal(signals[0]))


def failure_file(folder: Path, placement: Placement) -> Path:
    """Return the file to which a job's process writes its failure, one for each task of a cluster job."""
    return folder / f"failure_{placement.rank}.txt"


def _has_failed_elsewhere(job: Record, folder: Path) -> bool:
    """Return whether another task of the job has failed, for which this task would wait."""
    there = record.read(folder)
    return there is not None and (there.start, there.state) == (job.start, FAILED)
