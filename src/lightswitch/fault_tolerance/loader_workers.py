"""What became of a data loader's worker, from the error that torch makes of it in its rank."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

_SETTLE_SECONDS = 2.0


def cause(error: BaseException) -> str | None:
    """In a line; None for an error that came of no worker.

    torch raises what was raised in a worker again, as one that begins with where it was caught; of a worker that was
    killed it knows the process alone.
    """
    owners = _owners(error)
    wrapper: Any = owners[-1] if owners else None
    if type(wrapper).__name__ == "ExceptionWrapper":
        *_, last = str(wrapper.exc_msg).strip().splitlines()
        return f"{last} ({wrapper.where})"
    workers = _workers(owners)
    if isinstance(error, EOFError | ConnectionError):  # a process that ends closes its pipes before it has ended
        wait([worker.sentinel for worker in workers], _SETTLE_SECONDS)
    dead = [f"DataLoader worker process {one.pid} {_ended(one.exitcode)}" for one in workers if one.exitcode]
    return ", ".join(dead) or None


def was_killed(error: BaseException) -> bool:
    """Whether the error came of a worker that was killed by SIGKILL, as the kernel does where memory ran out."""
    return any(worker.exitcode == -signal.SIGKILL for worker in _workers(_owners(error)))


def _owners(error: BaseException) -> list[Any]:
    """The objects whose methods the error passed through, the outermost first; None for a function."""
    return [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]


def _workers(owners: list[Any]) -> list[BaseProcess]:
    return list(dict.fromkeys(worker for owner in owners for worker in _workers_of(owner)))


def _workers_of(owner: Any) -> Iterator[BaseProcess]:
    found = getattr(owner, "_workers", None)
    return (worker for worker in found if isinstance(worker, BaseProcess)) if isinstance(found, list) else iter(())


def _ended(exit_code: int) -> str:
    return f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"
