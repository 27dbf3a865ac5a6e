"""The claim of a run's first process on the run directory: one start of one run writes there at a time."""

from __future__ import annotations

import contextlib
import itertools
import sys
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightswitch.cluster import placement, processes
from lightswitch.errors import ExitCode, Refused
from lightswitch.runs import lock
from lightswitch.runs.lock import Lock

_locks: list[Lock] = []  # of this process: of its run, or its sweep
_refusals: list[str] = []  # for the ranks of this run, once they meet


def take(cfg: DictConfig) -> None:
    """
    Raises:
        Refused: another start writes there. Where a launcher has started several ranks, all are told when they meet.
    """
    place = placement.detect()
    if place.rank != 0 or (cfg.get("cluster") or {}).get("node_rank"):  # by hand, each node has a process of its own
        return
    try:
        take_folder(Path(HydraConfig.get().runtime.output_dir))
    except Refused as refusal:
        if place.nodes * (place.devices_per_node or 1) == 1:
            raise
        _refusals.append(str(refusal))


def take_folder(folder: Path) -> None:
    """
    Raises:
        Refused: another process has it.
    """
    _locks.append(lock.take(folder, on_lost=_end))
    if give_back not in processes.last_acts:
        processes.last_acts.append(give_back)


def refusal() -> str:
    """Why the ranks of this run may not write in its directory; empty if they may."""
    return "".join(_refusals)


def for_child() -> Any:
    """The lock, for a process that is being spawned: should this one be killed, the lock stays until that one ends."""
    return DupFd(_locks[0].descriptor) if _locks and get_spawning_popen() is not None else None


def is_held() -> bool:
    """By this process, or by the one that has forked it."""
    return bool(_locks)


def give_back() -> None:
    while _locks:
        _locks.pop().release()


def remove_if_empty(folder: Path) -> None:
    """With those above it, up to the working directory. Each process of a launcher is here at about the same time."""
    for path in itertools.takewhile(lambda parent: Path.cwd() in parent.parents, (folder, *folder.parents)):
        with contextlib.suppress(OSError):  # it is an earlier run's, or there are other runs in it
            path.rmdir()


def _end(line: str) -> None:
    print(f"error: {line}", file=sys.stderr, flush=True)
    processes.leave_now(ExitCode.REFUSED)  # started again, it would be refused as well
