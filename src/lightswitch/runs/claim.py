"""The lock that a run's first process holds on the run directory, so that no other start writes there."""

from __future__ import annotations

import contextlib
import itertools
import sys
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightswitch.context import RunContext
from lightswitch.errors import ExitCode, Refused
from lightswitch.process.state import Process
from lightswitch.runs import lock


def take(cfg: DictConfig, run: RunContext) -> None:
    """Hold the run directory until this process ends.

    Raises:
        Refused: another start writes there. With several ranks, the refusal is kept until the processes connect.
    """
    if not run.is_first or (cfg.get("cluster") or {}).get("node_rank"):  # with cluster=manual, each node has a first
        return
    try:
        take_folder(run.run_dir, run.process)
    except Refused as refusal:
        if run.placement.nodes * (run.placement.devices_per_node or 1) == 1:
            raise
        run.process.refusal = str(refusal)


def take_folder(folder: Path, process: Process) -> None:
    """Hold any directory until this process ends.

    Raises:
        Refused: another process has it.
    """

    def end(line: str) -> None:
        print(f"error: {line}", file=sys.stderr, flush=True)
        process.leave_now(ExitCode.REFUSED)  # started again, it would be refused as well

    process.locks.append(lock.take(folder, on_lost=end))


def for_child(process: Process) -> Any:
    """Return the lock in a form that a spawned process inherits; None if no process is being spawned.

    If this process is killed, the lock lasts until that one ends.
    """
    return DupFd(process.locks[0].descriptor) if process.locks and get_spawning_popen() is not None else None


def remove_if_empty(folder: Path) -> None:
    """Remove a folder and those above it, up to the working directory, as far as they are empty.

    Several processes of a launcher may do so at the same time.
    """
    for path in itertools.takewhile(lambda parent: Path.cwd() in parent.parents, (folder, *folder.parents)):
        with contextlib.suppress(OSError):  # it holds an earlier run, or other runs
            path.rmdir()
