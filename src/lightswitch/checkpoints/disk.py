"""Errors of a disk that takes or gives back no more data, in words: that it is full, for one."""

from __future__ import annotations

import contextlib
import errno
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException as CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightswitch.checkpoints import safe

_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}

# torch 2.8 writes checkpoints by way of what it deprecates
warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning, r"torch\.distributed\.checkpoint")


class Writer(FileSystemWriter):
    """Writer of torch's checkpoint files, whose errors keep their cause on the way to the other ranks.

    It copies nothing ahead: what it is given is on the CPU, and torch would open a stream on the first GPU, also for a
    run on CPUs, and wait for it every 10 MB.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with true_cause():
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with true_cause():
            super().finish(metadata, results)


@contextlib.contextmanager
def true_cause() -> Iterator[None]:
    """Raise the disk's error in place of torch's, which tells that the file is shorter than it should be."""
    try:
        yield
    except Exception as error:
        if (cause := _disk_error(error)) is not None:
            raise cause from None
        raise


def describe(error: BaseException, rank: int) -> str:
    """Return in a few words which rank's error it is and what it is."""
    if isinstance(error, CheckpointException):  # raised on every rank; it names the one it comes from
        return "; ".join(f"rank {number}: {first_line(cause)}" for number, (cause, _) in sorted(error.failures.items()))
    return f"rank {rank}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error, and whether it means that the disk is full."""
    if named := safe.called(error):
        return f"a tensor's file {named}"
    first = str(error).partition("\n")[0] or type(error).__name__
    full = _FULL.get(error.errno or 0) if isinstance(error, OSError) else None
    return f"{full}: {first}" if full else first


def _disk_error(error: BaseException | None) -> OSError | None:
    seen: Any = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    return seen
