"""What became of a data loader's worker, from the error that torch makes of it in its rank."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any


def cause(error: BaseException) -> str | None:
    """In a line; None for an error that came of no worker.

    torch raises what was raised in a worker again, as one that begins with where it was caught; of a worker that was
    killed it knows the process alone.
    """
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    wrapper: Any = owners[-1] if owners else None
    if type(wrapper).__name__ == "ExceptionWrapper":
        *_, last = str(wrapper.exc_msg).strip().splitlines()
        return f"{last} ({wrapper.where})"
    dead = [told for owner in owners for told in _dead(getattr(owner, "_workers", None))]
    return ", ".join(dict.fromkeys(dead)) or None


def _dead(workers: object) -> Iterator[str]:
    for worker in workers if isinstance(workers, list) else []:
        if isinstance(worker, BaseProcess) and worker.exitcode:
            yield f"DataLoader worker process {worker.pid} {_ended(worker.exitcode)}"


def _ended(exit_code: int) -> str:
    return f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"
