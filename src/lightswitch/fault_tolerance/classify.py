"""Whose an error in a run is: the user's to mend, told in a line, or a bug's, which keeps its traceback.

It is asked of the error itself, in the process that raises it: what it is an instance of, and where it was raised.
"""

from __future__ import annotations

import contextlib
import dis
import errno
import os
import sys
from dataclasses import replace
from itertools import takewhile
from types import FrameType

from omegaconf import DictConfig, OmegaConf

from lightswitch.cluster.placement import Placement
from lightswitch.config.confidential import Cleaner
from lightswitch.errors import ExitCode, Failure, LostRank, Refused
from lightswitch.fault_tolerance.crash_report import CrashReport
from lightswitch.fault_tolerance.failure import Rank, in_words, node_name, of_error, shown

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_ON_PURPOSE = (ValueError, FileNotFoundError, ModuleNotFoundError)


def failure(error: BaseException, cfg: DictConfig, rank: Rank, steps_have_begun: bool) -> Failure:
    cleaned = Cleaner.of(cfg).cleaned
    if not (problems := mistakes(error, cfg, steps_have_begun)):
        bug = Failure(str(error), shown(error)) if isinstance(error, LostRank) else of_error(rank, error)
        return replace(bug, line=cleaned(bug.line), details=cleaned(bug.details))
    lines = "\n".join(f"error: {cleaned(problem)}" for problem in problems)
    details = error.details if isinstance(error, Refused) else shown(error)  # what the engine refuses says all
    return Failure(lines, cleaned(details), ExitCode.REFUSED, rank=rank.number)


def mistakes(error: BaseException, cfg: DictConfig, steps_have_begun: bool) -> list[str]:
    """Lines for what the user can mend; none for a bug.

    The engine refuses by exceptions of its own. The model's and the data's code speaks to the user where it raises a
    ValueError by a `raise` of its own before the first step: of a batch, a file, a size. One that comes from elsewhere,
    or that Python raises, or that comes later, is a bug.
    """
    if isinstance(error, Refused):
        return error.problems
    if isinstance(error, OSError) and error.errno in _FULL_DISK:
        return [f"the disk is full: {error.strerror}{f': {error.filename}' if error.filename else ''}"]
    if steps_have_begun or type(error) not in _ON_PURPOSE:
        return []
    frame = raised_in(error)
    node = _owner(str(frame.f_globals.get("__name__")), cfg) if frame is not None else None
    return [f"{node}: {' '.join(str(error).split())}"] if node is not None else []


def raised_in(error: BaseException) -> FrameType | None:
    """The frame whose `raise` statement raised it; None where Python did, or a function in C."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    is_raise = at is not None and at.tb_frame.f_code.co_code[at.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return at.tb_frame if at is not None and is_raise else None


def _owner(module: str, cfg: DictConfig) -> str | None:
    """The config node, model or data, of whose package a module is: the one whose code is nearer to it."""
    shared = {}
    for node in ("model", "data"):
        target = str(OmegaConf.select(cfg, f"{node}._target_", default="")).split(".")
        same = (one == other for one, other in zip(target, module.split("."), strict=False))
        shared[node] = len(list(takewhile(bool, same)))
    nearest = max(shared, key=lambda node: shared[node])
    return nearest if shared[nearest] else None


def add_report(error: BaseException, own: Failure, rank: Rank, place: str, report: CrashReport) -> None:
    """Of a run of one process, whose traceback Python prints."""
    if report.folder.exists():
        return
    with contextlib.suppress(OSError):  # a full disk: the error itself is what counts
        report.add_rank(rank, place, own)
        if sys.version_info >= (3, 11):  # printed below the traceback
            if in_words(error) not in own.line:
                error.add_note(own.line)
            error.add_note(f"crash report: {os.path.relpath(report.folder)}")


def rank_of(cfg: DictConfig, place: Placement) -> Rank:
    """As far as a process knows that has not met the others."""
    if place.is_external:
        return Rank(place.rank, place.nodes * (place.devices_per_node or 1), node_name(), os.getpid())
    world, node, local = (
        int(os.environ.get(name, least)) for name, least in {"WORLD_SIZE": 1, "NODE_RANK": 0, "LOCAL_RANK": 0}.items()
    )
    nodes = OmegaConf.select(cfg, "trainer.num_nodes", default=1)
    return Rank(node * (world // max(1, nodes)) + local, world, node_name(), os.getpid())
