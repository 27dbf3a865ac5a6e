"""The name of a run's directory: the same in every process of the run, another for every other run."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Mapping

from lightswitch.cluster import placement
from lightswitch.errors import RefusedRequest

_CLOCK = "%Y-%m-%d_%H-%M-%S"


def new_run_id(environ: Mapping[str, str] = os.environ) -> str:
    """Return Slurm's job id in a job's script or step, or torchrun's run id, or else the clock's time.

    Raises:
        RefusedRequest: processes that were started apart from each other have nothing in common to name the run by.
    """
    if (job := _of_slurm(environ)) is not None:
        return job
    place = placement.detect(environ)
    if place.launcher == "torchrun":
        return _of_torchrun(place, environ["TORCHELASTIC_RUN_ID"])
    if place.launcher == "env" and int(environ["WORLD_SIZE"]) > 1:
        raise RefusedRequest([_nothing_in_common("processes started one by one")])
    return f"{time.strftime(_CLOCK)}_{secrets.token_hex(3)}"  # two runs may start in the same second


def slurm_job(environ: Mapping[str, str] = os.environ) -> str | None:
    """As scontrol takes it: the SLURM_JOB_ID of an array's last task means all tasks of the array."""
    if "SLURM_ARRAY_JOB_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ.get("SLURM_JOB_ID")


def _of_slurm(environ: Mapping[str, str]) -> str | None:
    """Of what a batch script starts, which Slurm may start again; None in a shell that somebody types in.

    Such a shell has the job's variables, too: salloc's is in no step of the job, and that of `srun --pty` has its port.
    Outside of a batch script, a step after the first is one more command in an allocation: it has a number of its own.
    """
    job, is_batch = slurm_job(environ), environ.get("ENVIRONMENT") == "BATCH"
    if job is None:
        return None
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "0")  # in what srun starts alone
    if tasks not in ("0", "1") or (tasks == "1" and "SLURM_PTY_PORT" not in environ):
        step = environ.get("SLURM_STEP_ID", "0")
        return job if is_batch or step == "0" else f"{job}.{step}"
    return job if is_batch and not _is_typed() else None


def _is_typed() -> bool:
    """In a terminal, as a notebook's server that runs in a job may open one."""
    return sys.stdin is not None and sys.stdin.isatty()


def _of_torchrun(place: placement.Placement, given: str) -> str:
    if given != "none":  # what torchrun says when it was given no --rdzv-id
        return given
    if place.nodes > 1:
        raise RefusedRequest([_nothing_in_common("torchrun on several nodes without --rdzv-id")])
    import psutil  # when needed: a mistake is to be told at once

    agent = psutil.Process().parent()
    assert agent is not None
    return f"{time.strftime(_CLOCK, time.localtime(agent.create_time()))}_{agent.pid}"


def _nothing_in_common(what: str) -> str:
    return f"{what}: the processes can't agree on a run directory by themselves; give each the same run_id=NAME"
