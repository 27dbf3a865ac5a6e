"""Classification of errors: a problem that the user can fix is reported in one line, a bug with its traceback.

The process that raises an error classifies it by its class and by the code that raised it.
"""

from __future__ import annotations

import dis
import errno
import os
import re
import socket
import sys
import sysconfig
import traceback
from collections.abc import Set
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any, TypeGuard

from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from lightswitch.cluster.placement import Placement
from lightswitch.errors import ExitCode, Failure, LostRank, Refused
from lightswitch.runs import claim

_LONGEST_LINE, _LONGEST_DETAILS = 1_000, 80_000  # characters in the store: an error message can have any length
# Errors of a rank that has lost its connection to another rank, from gloo, NCCL and the rendezvous store
_FOLLOWS = re.compile(r"gloo|NCCL|TCPStore|connection|broken pipe|no route to host|socket|timed? ?out", re.IGNORECASE)
_KILLED_WORKER = re.compile(r"DataLoader worker \(pid.*killed by signal: Killed")  # as torch says, here or in the cause
_OF_DEVICES = re.compile(r"AcceleratorError|(CUDA|HIP) error")
_MIXES_TENSORS = "got mixed torch.Tensor and DTensor"  # torch's, for a sharded parameter and a plain tensor
# Failed memory allocations: torch on a GPU; CUDA and HIP, also inside NCCL errors; libraries such as cuBLAS; torch on
# the CPU; Python
_LACKS_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|_STATUS_ALLOC_FAILED|Cuda failure 2\b|can't allocate memory|^MemoryError"
)
_OF_DISKS = {  # errors of reading and writing files that the user can fix
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EIO: "the disk failed",
    errno.EROFS: "the disk is read-only",
    errno.EACCES: "a permission is missing",
}
_LOADERS = ("torch.utils.data.sampler", "torch.utils.data.dataloader")
_DATA_CONNECTOR = (
    "lightning.pytorch.trainer.connectors.data_connector"  # refuses loaders, also of a test after training
)
_ON_PURPOSE = (ValueError, FileNotFoundError, ModuleNotFoundError)
_ENGINE = str(Path(__file__).parents[1])
_PYTHON = sysconfig.get_paths()["stdlib"]
_INSTALLED = {"site-packages", "dist-packages"}  # of this environment, or of the system's, which it may include


@dataclass(frozen=True)
class Rank:
    """One process of a run, shown in messages as `rank 1 of 2 on node3`."""

    number: int
    world_size: int | None  # None: not known yet
    node: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.number}{f' of {self.world_size}' if self.world_size else ''} on {self.node}"


def failure(error: BaseException, cfg: DictConfig, rank: Rank, steps_have_begun: bool) -> Failure:
    """Convert an error to a Failure: exit code 2 and a line per problem if the user can fix it, else exit code 1."""
    whole: Any = HydraConfig.instance().cfg or cfg  # includes the hydra node, such as hydra.run.dir
    problems = problems_of(error, cfg, steps_have_begun)
    run_dir = Path(OmegaConf.select(whole, "hydra.runtime.output_dir") or ".")
    if steps_have_begun and claim.is_removed(run_dir):  # whatever stumbled over it, and reports it in its own words
        problems = [claim.removed(run_dir)]
    if not problems:
        if not isinstance(error, LostRank):
            return failure_of(rank, error)
        follows = error.__cause__ is not None and is_of_another_rank_or_device(error.__cause__)
        return Failure(str(error), full_traceback(error), follows=follows)
    lines = "\n".join(f"error: {problem}" for problem in problems)
    # the engine's messages need no traceback
    details = error.details if isinstance(error, Refused) else full_traceback(error)
    return Failure(lines, details, ExitCode.REFUSED, rank=rank.number)


def problems_of(error: BaseException, cfg: DictConfig, steps_have_begun: bool) -> list[str]:
    """Return a line for each problem that the user can fix, or an empty list for a bug.

    The engine reports such problems by `Refused`. Lightning reports them by any error of its own before the first step.
    The code of the model and the data reports them by a `raise` statement with a ValueError, FileNotFoundError or
    ModuleNotFoundError: the model's before the first step, as torch's optimizers do, the data's at any time, since it
    may read files later. Every other error is a bug.
    """
    if isinstance(error, Refused):
        return error.problems
    if _is_of_disk(error):
        named = f": {os.fsdecode(error.filename)}" if error.filename else ""
        return [f"{_OF_DISKS[error.errno or 0]}: {error.strerror}{named}; fix it, then start the run again"]
    frame, is_before = raised_in(error), not steps_have_begun
    module, text = str(frame.f_globals.get("__name__")) if frame is not None else "", " ".join(str(error).split())
    if module.startswith("lightning.") and (is_before or module == _DATA_CONNECTOR):
        return [text]
    if type(error) not in _ON_PURPOSE:
        return []
    if is_before and module in _LOADERS:
        empty = "; its dataset is empty" if text.endswith("num_samples=0") else ""
        return [f"data: {text}{empty}"]
    if is_before and module.startswith("torch.optim."):
        return [f"optimizer: {text}"]
    node = _owner(module, cfg, {type(owner).__name__ for owner in _owners(error)}) if module else None
    return [f"{node}: {text}"] if node == "data" or (node and is_before) else []


def _is_of_disk(error: BaseException) -> TypeGuard[OSError]:
    """Return whether an error comes from the disk; a missing permission may be of something else than a file."""
    return isinstance(error, OSError) and error.errno in _OF_DISKS and (error.errno != errno.EACCES or error.filename)


def raised_in(error: BaseException) -> FrameType | None:
    """Return the frame whose `raise` statement raised an error; None if Python itself or a C function raised it."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    is_raise = at is not None and at.tb_frame.f_code.co_code[at.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return at.tb_frame if at is not None and is_raise else None


def _owner(module: str, cfg: DictConfig, classes: Set[str]) -> str | None:
    """Return the config node (model or data) whose `_target_` shares the longer dotted prefix with a module, if any.

    Args:
        classes: names of the classes that the error passed through, which decide between two targets in one module.
    """
    shared = {}
    for node in ("model", "data"):
        target = str(OmegaConf.select(cfg, f"{node}._target_", default="")).split(".")
        same = (one == other for one, other in zip(target, module.split("."), strict=False))
        shared[node] = (len(list(takewhile(bool, same))), target[-1] in classes)
    nearest = max(shared, key=lambda node: shared[node])
    return nearest if shared[nearest][0] else None


def failure_of(rank: Rank, error: BaseException) -> Failure:
    """Convert an error to a rank's failure; `follows` is set if the error suggests that another rank failed first."""
    cause = error
    while isinstance(cause, InstantiationException) and cause.__cause__ is not None:  # Hydra wraps the error
        cause = cause.__cause__
    line = _error_of_worker(cause) or one_line(cause)
    if _KILLED_WORKER.search(f"{line} {cause.__cause__}") and oom_kills() > _OOM_KILLS:
        line += f"; {rank.node} ran out of memory"
    if _MIXES_TENSORS in line:
        line += "; in a training step, a parameter is unsharded only during its module's forward pass; "
        line += "compute with it in a hook such as on_train_batch_end, or use strategy=ddp"
    lacks_memory = _LACKS_MEMORY.search(f"{type(cause).__name__}: {cause}") is not None
    follows = not lacks_memory and _FOLLOWS.search(line) is not None
    return Failure(
        f"{rank} failed: {line}", full_traceback(error), follows=follows, rank=rank.number, lacks_memory=lacks_memory
    )


def is_of_another_rank_or_device(error: BaseException) -> bool:
    """Return whether an error suggests that another rank failed first, or that the device has failed."""
    text = f"{type(error).__name__}: {error}"
    return _FOLLOWS.search(text) is not None or _OF_DEVICES.search(text) is not None


def one_line(error: BaseException) -> str:
    """Return the class and the first message line of an error."""
    # a SyntaxError is preceded by indented lines with its location
    first = next(line for line in traceback.format_exception_only(error) if not line.startswith(" "))
    return first.strip().splitlines()[0]


def full_traceback(error: BaseException) -> str:
    """Return the traceback, including causes, as Python prints it."""
    return "".join(traceback.format_exception(error))


def shortened(failure: Failure) -> Failure:
    """Return a failure that fits into the store: the middle of long texts is cut out."""
    return replace(failure, line=_cut(failure.line, _LONGEST_LINE), details=_cut(failure.details, _LONGEST_DETAILS))


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest // 2]} [...] {text[len(text) - longest // 2 :]}"


def rank_of(placement: Placement) -> Rank:
    """Return this process's rank from its environment, before the process group exists."""
    if placement.is_external:
        number, world = placement.rank, placement.nodes * (placement.devices_per_node or 1)
    else:
        number, world = (int(os.environ.get(name, of)) for name, of in (("RANK", placement.rank), ("WORLD_SIZE", 1)))
    return Rank(number, world, node_name(), os.getpid())


def node_name() -> str:
    """Return this machine's host name, as shown in messages."""
    return socket.gethostname()


def is_of_engine(file: str) -> bool:
    """Return whether a file of code is the engine's."""
    return file.startswith(_ENGINE)


@lru_cache
def is_of_others(file: str) -> bool:
    """Return whether a file of code is the engine's, the script's, an installed package's or Python's."""
    is_installed = not _INSTALLED.isdisjoint(Path(file).parts)
    return is_installed or file.startswith((_PYTHON, _ENGINE, os.path.abspath(sys.argv[0]), "<"))


def oom_kills() -> int:
    """Return how many processes Linux has killed for lack of memory, in any cgroup; 0 on other systems."""
    try:
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return 0
    return int(counts.get("oom_kill", 0))


def _error_of_worker(error: BaseException) -> str | None:
    """Return the line of an error of a DataLoader worker, which torch raises again with a text that begins with the
    place where it was caught; None for any other error."""
    owners = _owners(error)
    if not owners or type(owners[-1]).__name__ != "ExceptionWrapper":
        return None
    *_, last = str(owners[-1].exc_msg).strip().splitlines()
    return f"{last} ({owners[-1].where})"


def _owners(error: BaseException) -> list[Any]:
    """Return `self` of each frame that the error passed through, outermost first; None for a plain function."""
    return [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]


_OOM_KILLS = oom_kills()  # when this process has started
