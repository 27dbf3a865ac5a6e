"""The name of a run's directory, and its lock: one start of one run writes there at a time. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lightswitch import regular_files
from lightswitch.cluster import placement
from lightswitch.context import RunContext
from lightswitch.errors import Refused, RefusedRequest, shown
from lightswitch.process import Process

log = logging.getLogger(__name__)

LOCK = ".lock"
_PATIENCE_SECONDS = 120.0  # for what a dead process has forked, and for an earlier start of this job to end
_POLL_SECONDS = 0.1
_CLOCK = "%Y-%m-%d_%H-%M-%S"
_ALONE = ("plan", "dry_run", "check")  # modes of one process, whatever number of nodes it reckons with
_MEET_SECONDS = 300.0  # where the config has no meet_timeout_seconds


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
    process.locks.callback(lock(folder))


@dataclass(frozen=True)
class Holder:
    """Process that writes to a run directory, as the lock file names it.

    Args:
        host: its machine.
        pid: its process id.
        since: time at which it took the lock.
        job: the job whose launcher may start it again; empty for a command that someone has typed.
    """

    host: str
    pid: int
    since: str
    job: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


def lock(folder: Path, environ: Mapping[str, str] = os.environ) -> Callable[[], None]:
    """Lock a directory until the result is called, or this process and those that it has forked have ended.

    Wait for what a dead process has forked, and for an earlier start of this job to end.

    Raises:
        Refused: another process has the lock, or the directory can't be written.
    """
    here = Holder(platform.node(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S"), job(environ) or "")
    try:
        path, descriptor = _lock(folder, here)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(here)).encode() + b"\n", 0)
    except OSError as error:
        raise Refused(f"{shown(folder)} can't be written: {error.strerror or error}") from error
    return partial(_release, path, descriptor, here.pid)


def _release(path: Path, descriptor: int, pid: int) -> None:
    if pid == os.getpid():  # not a forked process
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(folder: Path, here: Holder) -> tuple[Path, int]:
    path, end, is_reported = folder / LOCK, time.monotonic() + _PATIENCE_SECONDS, False
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # a start that was refused has removed the empty directory
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):  # its holder has not removed it
                return path, descriptor
        except BlockingIOError:
            pass
        except OSError:  # the file system has no flock
            os.close(descriptor)
            path.unlink(missing_ok=True)
            return _lock_without_flock(path.with_name(f"{LOCK}.only"))
        os.close(descriptor)
        other = _holder(path)
        if other is not None and (time.monotonic() > end or not _is_ending(other, here)):
            raise Refused(
                f"{shown(folder)} is being written by {other}; wait until it has ended, or give this run another run_id"
            )
        if other is not None and not is_reported:
            is_reported = True
            log.info("waiting    for %s and its children to end", other)
        time.sleep(_POLL_SECONDS)


def _lock_without_flock(path: Path) -> tuple[Path, int]:
    try:
        return path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        raise Refused(
            f"{shown(path.parent)} is being written by {_holder(path) or 'another process'}; wait until it has ended, "
            f"or give this run another run_id; if it was killed, type rm {shown(path)}: its file system has no flock"
        ) from None


def _holder(path: Path) -> Holder | None:
    """Return the holder that a lock file names; None while it has not written its line."""
    try:
        return regular_files.read_record(path, Holder)
    except (OSError, ValueError):
        return None


def _is_ending(other: Holder, here: Holder) -> bool:
    """Return whether a holder is dead, so that a process that it has forked holds its lock, or will be ended by the
    launcher that has started this process in its place."""
    if other.host == here.host:
        try:
            os.kill(other.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
    return bool(other.job) and other.job == here.job


def is_removed(run_dir: Path) -> bool:
    """Return whether the directory of a run in progress was removed; a logger may have made an empty one since."""
    return not any((run_dir / name).exists() for name in (LOCK, "config.yaml"))


def removed(run_dir: Path) -> str:
    """Return the line that ends a run whose directory was removed."""
    return f"{shown(run_dir)} was removed while the run wrote to it; start the run again"


def remove_if_empty(folder: Path) -> None:
    """Remove a folder and its parents below the working directory, as long as they are empty.

    Several processes of a launcher may do so at the same time.
    """
    for path in itertools.takewhile(lambda parent: Path.cwd() in parent.parents, (folder, *folder.parents)):
        with contextlib.suppress(OSError):  # it holds an earlier run, or other runs
            path.rmdir()


def new_run_id(
    environ: Mapping[str, str] = os.environ, cfg: DictConfig | None = None, process: Process | None = None
) -> str:
    """Return Slurm's job id in a job's script or step, torchrun's run id, or a name made of the start time.

    Processes on several nodes, and those that were started one by one, meet to take the name that rank 0 makes.

    Args:
        cfg: the config, which may say where the processes meet; None for none.
        process: keeps the meeting.

    Raises:
        RefusedRequest: the processes can't meet, or are elastic, so that rank 0 may be lost, and its name with it.
    """
    if (job := _of_slurm(environ)) is not None:
        return job
    found = placement.detect(environ)
    if found.launcher == "torchrun" and environ["TORCHELASTIC_RUN_ID"] != "none":  # torchrun's default for --rdzv-id
        return environ["TORCHELASTIC_RUN_ID"]
    own = f"{time.strftime(_CLOCK)}_{secrets.token_hex(3)}"  # two runs may start in one second
    if found.launcher == "torchrun":
        if placement.elastic_nodes(environ) or not _outlives_restarts(found, environ):
            raise RefusedRequest([_WITHOUT_ID])
        own = _of_agent() if found.nodes == 1 else own
    place = meeting_place(found, environ, cfg)
    return own if place is None else _of_rank_0(place, own, cfg, process or Process())


def job(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the job that this process belongs to, if its launcher starts its command again: Slurm's, or torchrun's."""
    if (of_slurm := _of_slurm(environ)) is not None:
        return f"Slurm job {of_slurm}"
    found = placement.detect(environ)
    if found.launcher != "torchrun":
        return None
    return f"torchrun {_of_agent() if environ['TORCHELASTIC_RUN_ID'] == 'none' else environ['TORCHELASTIC_RUN_ID']}"


def restarted_job(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the job that this process may be a restart of; None if its launcher counts restarts, and this is none.

    An elastic torchrun doesn't count those after a node has joined or left, Slurm those on the nodes that are left.
    """
    named = job(environ)
    counts = _of_slurm(environ) is None and placement.elastic_nodes(environ) is None
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


def _of_agent() -> str:
    """Return a name made of the time when torchrun was started, the same in all processes of a node."""
    import psutil  # only when needed: it is slow to import

    agent = psutil.Process().parent()
    assert agent is not None
    return f"{time.strftime(_CLOCK, time.localtime(agent.create_time()))}_{agent.pid}"


_WITHOUT_ID = (
    "torchrun without --rdzv-id: the run could not be found again when torchrun starts its processes again; type "
    "--rdzv-id=NAME, or give each process the same run_id=NAME"
)


def _outlives_restarts(found: placement.Placement, environ: Mapping[str, str]) -> bool:
    """Return whether torchrun has a store by which its nodes agree, and which it keeps when it restarts processes."""
    return found.nodes == 1 or environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meeting_place(
    found: placement.Placement, environ: Mapping[str, str], cfg: DictConfig | None
) -> tuple[str, int, int, int] | None:
    """Return where processes that share no launcher meet: address, port, number of this one, how many they are.

    Of processes that start the other ranks of their node, one of each node comes. The numbers in the config are not
    checked yet: for values that preflight will report, the result is None.
    """
    if found.launcher in ("torchrun", "env"):
        is_alone = found.nodes == 1 if found.launcher == "torchrun" else environ["WORLD_SIZE"] == "1"
        if is_alone:
            return None
        return environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), found.rank, int(environ["WORLD_SIZE"])
    if cfg is None or found.is_external or cfg.get("mode") in _ALONE:
        return None
    nodes, cluster = OmegaConf.select(cfg, "trainer.num_nodes"), cfg.get("cluster") or {}
    address, port, node = (
        OmegaConf.select(cfg, f"cluster.{key}", throw_on_missing=False)
        for key in ("main_address", "main_port", "node_rank")
    )
    if "main_address" not in cluster and {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():  # Lightning's own way
        address, port, node = environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), int(environ.get("NODE_RANK", 0))
    is_placed = isinstance(address, str) and all(type(number) is int for number in (nodes, port, node))
    return (address, port, node, nodes) if is_placed and nodes > 1 else None


def _of_rank_0(place: tuple[str, int, int, int], own: str, cfg: DictConfig | None, process: Process) -> str:
    from lightswitch.cluster import rendezvous  # imports torch

    seconds = OmegaConf.select(cfg, "meet_timeout_seconds") if cfg is not None else None
    point = rendezvous.MeetingPoint(*place, seconds if isinstance(seconds, int | float) else _MEET_SECONDS)
    try:
        name, meeting = rendezvous.agree_on_id(point, own)
    except Refused as refusal:
        raise RefusedRequest([str(refusal)]) from refusal
    if meeting is not None:
        process.meeting = meeting
        process.locks.callback(meeting.part)  # before this process ends, and the store with it
    return name
