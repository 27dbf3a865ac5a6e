"""Name of a run's directory, and its lock, which the run's first process holds."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig

from lightswitch.cluster import placement
from lightswitch.context import RunContext
from lightswitch.errors import ExitCode, Refused, RefusedRequest
from lightswitch.process import Process
from lightswitch.runs import lock

_CLOCK = "%Y-%m-%d_%H-%M-%S"


def take(cfg: DictConfig, run: RunContext) -> None:
    """Lock the run directory until this process ends.

    Raises:
        Refused: another start writes there. With several ranks, the error is stored until the processes connect.
    """
    if not run.is_first or (cfg.get("cluster") or {}).get("node_rank"):  # cluster=manual: each node has a first process
        return
    try:
        take_folder(run.run_dir, run.process)
    except Refused as refusal:
        if run.placement.nodes * (run.placement.devices_per_node or 1) == 1:
            raise
        run.process.refusal = str(refusal)


def take_folder(folder: Path, process: Process) -> None:
    """Lock any directory until this process ends.

    Raises:
        Refused: another process has the lock.
    """

    def end(line: str) -> None:
        print(f"error: {line}", file=sys.stderr, flush=True)
        process.leave_now(ExitCode.REFUSED)  # a restarted process would be refused as well

    def save_and_end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    process.locks.append(lock.take(folder, end, save_and_end))


def remove_if_empty(folder: Path) -> None:
    """Remove a folder and its parents below the working directory, as long as they are empty.

    Several processes of a launcher may do so at the same time.
    """
    for path in itertools.takewhile(lambda parent: Path.cwd() in parent.parents, (folder, *folder.parents)):
        with contextlib.suppress(OSError):  # it holds an earlier run, or other runs
            path.rmdir()


def new_run_id(environ: Mapping[str, str] = os.environ) -> str:
    """Return Slurm's job id in a job's script or step, torchrun's run id, or a name made of the start time.

    Raises:
        RefusedRequest: the processes have nothing in common to name the run by: they were started one by one, or by
            torchrun on several nodes without an id.
    """
    if (job := _of_slurm(environ)) is not None:
        return job
    found = placement.detect(environ)
    if found.launcher == "torchrun":
        return _of_torchrun(found, environ["TORCHELASTIC_RUN_ID"])
    if found.launcher == "env" and int(environ["WORLD_SIZE"]) > 1:
        raise RefusedRequest([_nothing_in_common("processes started one by one")])
    return f"{time.strftime(_CLOCK)}_{secrets.token_hex(3)}"  # two runs may start in one second


def job(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the job that this process belongs to, if its launcher starts its command again: Slurm's, or torchrun's."""
    if (of_slurm := _of_slurm(environ)) is not None:
        return f"Slurm job {of_slurm}"
    found = placement.detect(environ)
    if found.launcher != "torchrun":
        return None
    if found.nodes > 1 and environ["TORCHELASTIC_RUN_ID"] == "none":
        return f"torchrun at {environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    return f"torchrun {_of_torchrun(found, environ['TORCHELASTIC_RUN_ID'])}"


def restarted_job(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the job that this process may be a restart of; None if its launcher counts restarts, and this is none.

    An elastic torchrun doesn't count those after a node has joined or left, Slurm those on the nodes that are left.
    """
    named = job(environ)
    counts = _of_slurm(environ) is None and not placement.elastic_group(environ)
    return None if counts and environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" else named


def slurm_job(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the job's id as scontrol accepts it; SLURM_JOB_ID of an array's last task would mean the whole array."""
    if "SLURM_ARRAY_JOB_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ.get("SLURM_JOB_ID")


def _of_slurm(environ: Mapping[str, str]) -> str | None:
    """Return the job's id in processes that a batch script starts, and may restart; None in an interactive shell.

    Interactive shells have the job's variables, too: salloc's shell is in no step of the job, and the shell of
    `srun --pty` has a port. Outside of a batch script, a step after the first is another command in the allocation, so
    its number is added.
    """
    job, is_batch = slurm_job(environ), environ.get("ENVIRONMENT") == "BATCH"
    if job is None:
        return None
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "0")  # only set in processes that srun starts
    if tasks not in ("0", "1") or (tasks == "1" and "SLURM_PTY_PORT" not in environ):
        step = environ.get("SLURM_STEP_ID", "0")
        return job if is_batch or step == "0" else f"{job}.{step}"
    return job if is_batch and not _is_typed() else None


def _is_typed() -> bool:
    """Return whether this process has a terminal, for example one that a notebook server in a job has opened."""
    return sys.stdin is not None and sys.stdin.isatty()


def _of_torchrun(found: placement.Placement, given: str) -> str:
    if given != "none":  # torchrun's default for --rdzv-id
        return given
    if found.nodes > 1:
        raise RefusedRequest([_nothing_in_common("torchrun on several nodes without --rdzv-id")])
    import psutil  # only when needed: it is slow to import

    agent = psutil.Process().parent()
    assert agent is not None
    return f"{time.strftime(_CLOCK, time.localtime(agent.create_time()))}_{agent.pid}"


def _nothing_in_common(what: str) -> str:
    return f"{what}: the processes can't agree on a run directory by themselves; give each the same run_id=NAME"
