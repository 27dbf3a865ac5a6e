"""Classification of errors: what the user can fix is told in a line, and a bug keeps its traceback.

It is decided in the process that raises the error, by the error's class and by where it was raised.
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
from lightswitch.fault_tolerance.failure import Rank, failure_of, full_traceback, node_name, one_line

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_SAMPLER = "torch.utils.data.sampler"  # refuses to shuffle nothing, where a DataLoader is made
_SEVERAL_OPTIMIZERS = "_validate_multiple_optimizers_support"  # of Lightning, which steps one by itself
_INTERVAL = "val_check_interval"  # of Lightning's loop, once it knows how many batches there are
_ON_PURPOSE = (ValueError, FileNotFoundError, ModuleNotFoundError)


def failure(error: BaseException, cfg: DictConfig, rank: Rank, steps_have_begun: bool) -> Failure:
    """Return an error as a Failure: exit code 2 and a line per problem if the user can fix it, otherwise exit code 1.

    Values that the config takes from the environment are replaced in its text.
    """
    cleaned = Cleaner.of(cfg).cleaned
    if not (problems := problems_of(error, cfg, steps_have_begun)):
        bug = Failure(str(error), full_traceback(error)) if isinstance(error, LostRank) else failure_of(rank, error)
        return replace(bug, line=cleaned(bug.line), details=cleaned(bug.details))
    lines = "\n".join(f"error: {cleaned(problem)}" for problem in problems)
    # the engine's own messages need no traceback
    details = error.details if isinstance(error, Refused) else full_traceback(error)
    return Failure(lines, cleaned(details), ExitCode.REFUSED, rank=rank.number)


def problems_of(error: BaseException, cfg: DictConfig, steps_have_begun: bool) -> list[str]:
    """Return a line for each problem that the user can fix; none for a bug.

    The engine refuses by `Refused`. The code of the model and the data addresses the user by a `raise` statement of its
    own, of a ValueError or a missing file, before the first step. An error of other code, of Python itself, or from a
    later step is a bug.
    """
    if isinstance(error, Refused):
        return error.problems
    if isinstance(error, OSError) and error.errno in _FULL_DISK:
        return [f"the disk is full: {error.strerror}{f': {error.filename}' if error.filename else ''}"]
    frame = raised_in(error)
    if frame is not None and frame.f_code.co_name == _SEVERAL_OPTIMIZERS:
        return [
            f"model: {type(frame.f_locals['model']).__name__} has several optimizers, of which Lightning steps one by "
            "itself; set self.automatic_optimization = False in its constructor, and step them in training_step"
        ]
    if frame is not None and frame.f_code.co_name == "setup_data" and _INTERVAL in str(error):
        interval = OmegaConf.select(cfg, f"trainer.{_INTERVAL}")
        return [
            f"trainer.{_INTERVAL}={interval} is more steps than an epoch has; type fewer, or "
            "trainer.check_val_every_n_epoch=null, which counts them over the epochs"
        ]
    if steps_have_begun or type(error) not in _ON_PURPOSE:
        return []
    if frame is not None and frame.f_globals.get("__name__") == _SAMPLER and str(error).endswith("num_samples=0"):
        return ["data: a DataLoader that shuffles has no samples, as its dataset is empty"]
    node = _owner(str(frame.f_globals.get("__name__")), cfg) if frame is not None else None
    return [f"{node}: {' '.join(str(error).split())}"] if node is not None else []


def raised_in(error: BaseException) -> FrameType | None:
    """Return the frame whose `raise` statement raised an error; None if Python raised it, or a function in C."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    is_raise = at is not None and at.tb_frame.f_code.co_code[at.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return at.tb_frame if at is not None and is_raise else None


def _owner(module: str, cfg: DictConfig) -> str | None:
    """Return the config node (model or data) whose package a module belongs to: the one with the longer common path."""
    shared = {}
    for node in ("model", "data"):
        target = str(OmegaConf.select(cfg, f"{node}._target_", default="")).split(".")
        same = (one == other for one, other in zip(target, module.split("."), strict=False))
        shared[node] = len(list(takewhile(bool, same)))
    nearest = max(shared, key=lambda node: shared[node])
    return nearest if shared[nearest] else None


def add_report(error: BaseException, own: Failure, rank: Rank, location: str, report: CrashReport) -> None:
    """Write the crash report of a run of one process, whose traceback Python prints.

    Args:
        location: where in training the run was, in words.
    """
    if report.folder.exists():
        return
    with contextlib.suppress(OSError):  # a full disk: the error itself is what counts
        report.add_rank(rank, location, own)
        if sys.version_info >= (3, 11):  # printed below the traceback
            if one_line(error) not in own.line or own.lacks_memory:
                error.add_note(own.line)
            error.add_note(f"crash report: {os.path.relpath(report.folder)}")


def rank_of(cfg: DictConfig, placement: Placement) -> Rank:
    """Return this process's rank, as far as it is known before the processes have connected."""
    if placement.is_external:
        return Rank(placement.rank, placement.nodes * (placement.devices_per_node or 1), node_name(), os.getpid())
    world, node, local = (
        int(os.environ.get(name, least)) for name, least in {"WORLD_SIZE": 1, "NODE_RANK": 0, "LOCAL_RANK": 0}.items()
    )
    nodes = OmegaConf.select(cfg, "trainer.num_nodes", default=1)
    return Rank(node * (world // max(1, nodes)) + local, world, node_name(), os.getpid())
