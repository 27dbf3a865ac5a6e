"""A rank's name, and its failure as plain data that can be sent to other ranks."""

from __future__ import annotations

import re
import socket
import traceback
from dataclasses import dataclass, replace

from hydra.errors import InstantiationException

from lightswitch.errors import Failure
from lightswitch.fault_tolerance import loader_workers

_LONGEST_LINE, _LONGEST_DETAILS = 1_000, 80_000  # characters of what is sent: a message's text can be of any length

# Errors of a rank that has lost another one: of gloo, NCCL, and the store that ranks connect to
_FOLLOWS = re.compile(r"gloo|NCCL|TCPStore|connection|broken pipe|no route to host|socket|timed? ?out", re.IGNORECASE)
# Errors of what could not be had: of torch's on a GPU, of its allocator on the CPU, of Python's
_MIXES_TENSORS = "got mixed torch.Tensor and DTensor"  # torch's, of a part of a parameter beside a whole tensor
_NAME_OF_FSDP1 = "_fsdp_wrapped_module."  # torch's, in a name that a module looks up
_LACKS_MEMORY = re.compile(r"OutOfMemoryError|can't allocate memory|^MemoryError")


@dataclass(frozen=True)
class Rank:
    """One process of a run, named in messages as `rank 1 of 2 on node3`."""

    number: int
    world_size: int | None  # None: not known yet
    node: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.number}{f' of {self.world_size}' if self.world_size else ''} on {self.node}"


def failure_of(rank: Rank, error: BaseException) -> Failure:
    """Return an error as a rank's failure, which `follows` if it looks as if another rank had failed before."""
    cause = error
    while isinstance(cause, InstantiationException) and cause.__cause__ is not None:  # Hydra wraps the error
        cause = cause.__cause__
    told = loader_workers.cause(cause) or one_line(cause)
    if _MIXES_TENSORS in told:
        told += "; here a parameter is whole in its unit's forward pass alone, and elsewhere in a training step in "
        told += "parts; compute with it in a hook, as on_train_batch_end, or use strategy=ddp"
    if isinstance(cause, KeyError) and _NAME_OF_FSDP1 in told:
        told += "; fsdp1 puts modules of its own into the names of parameters; use strategy=fsdp"
    follows = _FOLLOWS.search(told) is not None
    lacks_memory = _LACKS_MEMORY.search(one_line(cause)) is not None
    return Failure(
        f"{rank} failed: {told}", full_traceback(error), follows=follows, rank=rank.number, lacks_memory=lacks_memory
    )


def one_line(error: BaseException) -> str:
    """Return class and message of an error in one line; a SyntaxError has its location before it, indented."""
    told = next(line for line in traceback.format_exception_only(error) if not line.startswith(" "))
    return told.strip().splitlines()[0]


def full_traceback(error: BaseException) -> str:
    """Return the traceback with causes, as Python prints it."""
    return "".join(traceback.format_exception(error))


def shortened(failure: Failure) -> Failure:
    """Return a failure that fits into a message to the hub: the beginning and the end of its texts."""
    return replace(failure, line=_cut(failure.line, _LONGEST_LINE), details=_cut(failure.details, _LONGEST_DETAILS))


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest // 2]} [...] {text[len(text) - longest // 2 :]}"


def node_name() -> str:
    """Return the name of this machine in messages."""
    return socket.gethostname()
