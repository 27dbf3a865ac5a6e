"""The cause of a data loader worker's failure, found in the error that torch raises in its rank."""

from __future__ import annotations

import linecache
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

_SETTLE_SECONDS = 2.0
_LAST_FRAME = re.compile(r'.*^  File "(.+?)", line (\d+), in ', re.MULTILINE | re.DOTALL)


def cause(error: BaseException) -> str | None:
    """Return a worker's own error, or how it ended, in a line; None if the error came from no worker.

    torch raises a worker's error again, with a text that begins with where it was caught; of a worker that was killed
    it knows only the process id.
    """
    if (wrapper := _wrapper(error)) is not None:
        *_, last = str(wrapper.exc_msg).strip().splitlines()
        return f"{last} ({wrapper.where})"
    workers = _workers(_owners(error))
    if isinstance(error, EOFError | ConnectionError):  # a process that ends closes its pipes before it has ended
        wait([worker.sentinel for worker in workers], _SETTLE_SECONDS)
    dead = [f"DataLoader worker process {one.pid} {_ended(one.exitcode)}" for one in workers if one.exitcode]
    return ", ".join(dead) or None


def raised_by(error: BaseException) -> tuple[str, str] | None:
    """Return the module whose `raise` statement raised a worker's error, of a class that Python has, and its text.

    Known of it is the traceback that torch hands on as text; the worker's modules are those of this process.

    Returns:
        None for an error of no worker, and for one that Python raised, or a function in C.
    """
    wrapper = _wrapper(error)
    frame = _LAST_FRAME.match(str(wrapper.exc_msg)) if wrapper is not None else None
    if frame is None or not linecache.getline(frame[1], int(frame[2])).lstrip().startswith("raise "):
        return None
    modules = [name for name, module in list(sys.modules.items()) if getattr(module, "__file__", None) == frame[1]]
    text = str(wrapper.exc_msg)[frame.end() :].partition(f"\n{wrapper.exc_type.__name__}: ")[2]
    return (modules[0], text.strip()) if modules else None


def was_killed(error: BaseException) -> bool:
    """Return whether the error came from a worker killed by SIGKILL, as the kernel kills if memory runs out."""
    return any(worker.exitcode == -signal.SIGKILL for worker in _workers(_owners(error)))


def _wrapper(error: BaseException) -> Any:
    """Return what torch has carried a worker's error in; None if the error came from no worker."""
    owners = _owners(error)
    return owners[-1] if owners and type(owners[-1]).__name__ == "ExceptionWrapper" else None


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
