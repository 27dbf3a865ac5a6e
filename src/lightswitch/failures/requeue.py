"""Requeueing of a Slurm job, whose next start goes on from the last checkpoint."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
from signal import SIGTERM

from lightswitch.errors import ExitCode, Stopped
from lightswitch.process import signals
from lightswitch.runs.claim import slurm_job

log = logging.getLogger(__name__)


def after(stopped: Stopped, is_first: bool) -> Stopped:
    """Requeue the job if Slurm's notice stopped the run, and return the exception to exit by.

    SIGTERM is such a notice only if Slurm preempts the job, which it starts again if the job outlives its grace period.
    A user who cancels a job, which also sends SIGTERM, wants it to end.
    """
    job = slurm_job()
    if job is None:
        return stopped
    if shutil.which("scontrol") is None:
        if stopped.by in signals.REQUEUED:
            stopped.code = ExitCode.REQUEUE
    elif is_first and (stopped.by in signals.REQUEUED or (stopped.by == SIGTERM and _is_preempted(job))):
        _requeue(job)
    return stopped


def _is_preempted(job: str) -> bool:
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True).stdout
    return re.search(r"\bPreemptTime=\d", shown) is not None


def _requeue(job: str) -> None:
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    if done.returncode:
        log.error("job %s can't be requeued: %s", job, done.stderr.strip())
    else:
        log.info("requeued   job %s", job)
