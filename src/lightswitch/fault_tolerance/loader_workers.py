"""The cause of a data loader worker's failure, found in the error that torch raises in its rank."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

_SETTLE_SECONDS = 2.0


def cause(error: BaseException) -> str | None:
    """Return a worker's own error, or how it ended, in a line; None if the error came from no worker.

    torch raises a worker's error again, with a text that begins with where it was caught; of a worker that was killed
    it knows only the process id.
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
    """Return whether the error came from a worker killed by SIGKILL, as the kernel kills if memory runs out."""
    return any(worker.exitcode == -signal.SIGKILL for worker in _workers(_owners(error)))


def _owners(error: BaseException) -> list[Any]:
    """Return the objects whose methods the error passed through, the outermost first; None for a function."""
    return [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]


def _workers(owners: list[Any]) -> list[BaseProcess]:
    return list(dict.fromkeys(worker for owner in owners for worker in _workers_of(owner)))


def _workers_of(owner: Any) -> Iterator[BaseProcess]:
    found = getattr(owner, "_workers", None)
    return (worker for worker in found if isinstance(worker, BaseProcess)) if isinstance(found, list) else iter(())


def _ended(exit_code: int) -> str:
    return f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"
