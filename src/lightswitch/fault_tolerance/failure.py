"""What went wrong, and where, as plain data that can be sent."""

from __future__ import annotations

import re
import socket
import traceback
from dataclasses import dataclass, replace

from hydra.errors import InstantiationException

from lightswitch.errors import Failure
from lightswitch.fault_tolerance import loader_workers

_LONGEST_LINE, _LONGEST_DETAILS = 1_000, 80_000  # characters of what is sent: a message's text can be of any length

# Errors of a rank whose neighbour is gone: of gloo, NCCL, and the store where ranks meet
_FOLLOWS = re.compile(r"gloo|NCCL|TCPStore|connection|broken pipe|no route to host|socket|timed? ?out", re.IGNORECASE)


@dataclass(frozen=True)
class Rank:
    number: int
    world_size: int | None  # None: not known yet
    node: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.number}{f' of {self.world_size}' if self.world_size else ''} on {self.node}"


def of_error(rank: Rank, error: BaseException) -> Failure:
    cause = error
    while isinstance(cause, InstantiationException) and cause.__cause__ is not None:  # Hydra's, around it
        cause = cause.__cause__
    told = loader_workers.cause(cause) or in_words(cause)
    follows = _FOLLOWS.search(told) is not None
    return Failure(f"{rank} failed: {told}", shown(error), follows=follows, rank=rank.number)


def in_words(error: BaseException) -> str:
    """The first line of them: a SyntaxError's place comes before it, indented; notes come after."""
    told = next(line for line in traceback.format_exception_only(error) if not line.startswith(" "))
    return told.strip().splitlines()[0]


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def cut(failure: Failure) -> Failure:
    """Short enough for a message to the hub: the beginning and the end."""
    return replace(failure, line=_cut(failure.line, _LONGEST_LINE), details=_cut(failure.details, _LONGEST_DETAILS))


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest // 2]} [...] {text[len(text) - longest // 2 :]}"


def node_name() -> str:
    return socket.gethostname()
