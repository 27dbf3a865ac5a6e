"""Classification of errors: what the user can fix is told in a line, and a bug keeps its traceback.

It is decided in the process that raises the error, by the error's class and by where it was raised.
"""

from __future__ import annotations

import contextlib
import dis
import errno
import io
import os
import select
import sys
import threading
import traceback
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightswitch.cluster.placement import Placement
from lightswitch.config.confidential import Cleaner
from lightswitch.errors import ExitCode, Failure, LostRank, Refused, shown
from lightswitch.fault_tolerance import loader_workers
from lightswitch.fault_tolerance.crash_report import CrashReport
from lightswitch.fault_tolerance.failure import Rank, failure_of, full_traceback, node_name, one_line
from lightswitch.process.state import Process

_OF_DISKS = {  # errors of what a run writes or reads, which the user can mend
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EIO: "the disk fails",
    errno.EROFS: "the disk takes no writes",
    errno.EACCES: "a permission is missing",
}
_SAMPLER = "torch.utils.data.sampler"  # refuses to shuffle nothing, where a DataLoader is made
_SEVERAL_OPTIMIZERS = "_validate_multiple_optimizers_support"  # of Lightning, which steps one by itself
_INTERVAL = "val_check_interval"  # of Lightning's loop, once it knows how many batches there are
_SCHEDULES = "torch.optim.lr_scheduler"  # of which some have a length
_RESTORING = "lightning.pytorch.trainer.connectors.checkpoint_connector"
_LIBRARIES = (_RESTORING.partition(".")[0], "torch", "packaging", __name__.partition(".")[0])
_OF_ODD_STATE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_ON_PURPOSE = (ValueError, FileNotFoundError, ModuleNotFoundError)


def failure(error: BaseException, cfg: DictConfig, rank: Rank, steps_have_begun: bool) -> Failure:
    """Return an error as a Failure: exit code 2 and a line per problem if the user can fix it, otherwise exit code 1.

    Values that the config takes from the environment are replaced in its text.
    """
    whole: Any = HydraConfig.instance().cfg or cfg  # with Hydra's own part: hydra.run.dir
    cleaned = Cleaner.of(whole).cleaned
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
    own, of a ValueError or a missing file, before the first step, and that of the data also later, of a file that it
    reads then. An error of other code, of Python itself, or of the model in a later step is a bug.
    """
    if isinstance(error, Refused):
        return error.problems
    if isinstance(error, OSError) and is_of_disk(error):
        return [f"{_OF_DISKS[error.errno or 0]}: {error.strerror}: {_file_of(error)}; mend it, and start the run again"]
    if isinstance(error, BrokenPipeError) and _stdout_has_no_reader():
        return ["stdout: found no reader any more, as after `| head`; lead it into a file, and start the run again"]
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
    if frame is not None and frame.f_globals.get("__name__") == _SCHEDULES and "total steps" in str(error):
        schedule = frame.f_locals["self"]
        return [
            f"{type(schedule).__name__} ends at step {schedule.total_steps}, as the run began with it; type "
            "init_from=PATH of its last checkpoint, and another run_id, for a run that begins one anew"
        ]
    if not steps_have_begun and (checkpoint := _restored_by_libraries(error)) is not None:
        return [
            f"{checkpoint} can't be read as a checkpoint: {one_line(error)}; start anew with resume=never, or go on "
            "from another with resume=PATH"
        ]
    if type(error) not in _ON_PURPOSE:
        return []
    if frame is not None and frame.f_globals.get("__name__") == _SAMPLER and str(error).endswith("num_samples=0"):
        return ["data: a DataLoader that shuffles has no samples, as its dataset is empty"]
    in_worker = loader_workers.raised_by(error)
    module, text = in_worker or (str(frame.f_globals.get("__name__")) if frame is not None else "", str(error))
    node = _owner(module, cfg) if module else None
    if node is None or (steps_have_begun and node != "data"):
        return []
    return [f"{node}: {' '.join(text.split())}"]


def is_of_disk(error: BaseException) -> bool:
    """Return whether an error is the disk's, and of a file that is known: a bug may be refused other things."""
    return isinstance(error, OSError) and error.errno in _OF_DISKS and _file_of(error) is not None


def keep_disk_errors_of_threads(process: Process) -> None:
    """Keep what a library's thread is told by the disk, as TensorBoard's, in place of the traceback that Python prints.

    The main thread may meet it, too; else it is raised where the run ends.
    """
    tell = threading.excepthook

    def keep(raised: threading.ExceptHookArgs) -> None:
        if raised.exc_value is not None and is_of_disk(raised.exc_value):
            process.disk_error = process.disk_error or raised.exc_value
        else:
            tell(raised)

    threading.excepthook = keep


def _file_of(error: OSError) -> str | None:
    """Return the file that an error is of: its own, or the open one of the innermost call that has one."""
    if error.filename:
        return str(error.filename)
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        owner = frame.f_locals.get("self")
        for value in (*frame.f_locals.values(), *getattr(owner, "__dict__", {}).values()):
            name = getattr(value, "name", None) if isinstance(value, io.IOBase) else None
            if isinstance(name, str) and not name.startswith("<"):
                return name
    return None


def _stdout_has_no_reader() -> bool:
    looking = select.poll()
    looking.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in looking.poll(0))


def _restored_by_libraries(error: BaseException) -> str | None:
    """Return the checkpoint in which Lightning, torch or the engine met what they did not expect; None elsewhere.

    An error of other code that is given its state, as the module's own `on_load_checkpoint`, is that code's.
    """
    if not isinstance(error, _OF_ODD_STATE):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    if _RESTORING not in modules:
        return None
    first = modules.index(_RESTORING)
    path = getattr(getattr(frames[first].f_locals.get("self"), "trainer", None), "ckpt_path", None)
    is_theirs = all(module.partition(".")[0] in _LIBRARIES for module in modules[first:])
    return shown(Path(path)) if path and is_theirs and "dump" not in frames[first].f_code.co_name else None


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
    per_node = world // cfg.trainer.num_nodes if world > 1 else 0  # of one that rank 0 has started, its config is right
    return Rank(node * per_node + local, world, node_name(), os.getpid())
