"""Handing a Slurm job back to its queue, to be started again where it stood."""

from __future__ import annotations

import logging
import shutil
import subprocess

from lightswitch.launch import placement, signals
from lightswitch.launch.run_id import slurm_job

log = logging.getLogger(__name__)

HAND_BACK = 75  # EX_TEMPFAIL of sysexits.h: asks the job script to requeue, for a container that has no scontrol


def after(stopped: signals.Stopped) -> signals.Stopped:
    """Requeue the job if it was Slurm's notice that stopped the run, and say with which code to exit.

    Slurm requeues by itself what it preempts with SIGTERM, and a user who cancels a job wants it to end.
    """
    job = slurm_job()
    if stopped.by not in signals.REQUEUED or job is None:
        return stopped
    if shutil.which("scontrol") is None:
        stopped.code = HAND_BACK
    elif placement.detect().rank == 0:
        _requeue(job)
    return stopped


def _requeue(job: str) -> None:
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    if done.returncode:
        log.error("job %s can't be requeued: %s", job, done.stderr.strip())
    else:
        log.info("requeued   job %s", job)
