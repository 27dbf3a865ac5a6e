"""Functions called in forked processes, for what changes a process beyond repair: libraries' caches, for one."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TypeVar

from lightswitch.errors import Refused, RefusedRequest
from lightswitch.process.signals import CAUGHT

T = TypeVar("T")


def call_each(functions: Sequence[Callable[[], T]]) -> list[T]:
    """Call functions, each in a process of its own, as many at once as there are cores, and return their results.

    Args:
        functions: return what can be pickled, and raise nothing but Refused.

    Raises:
        RefusedRequest: what the first of them was refused with, or that its process has ended.
    """
    with ThreadPoolExecutor(min(len(functions), os.cpu_count() or 1)) as pool:
        return list(pool.map(_call, functions))


def _call(function: Callable[[], T]) -> T:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(function, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        result, refusal = ours.recv()
    except EOFError:
        child.join()
        raise RefusedRequest(
            [f"a process that was forked to plan the run has ended, with exit code {child.exitcode}"]
        ) from None
    child.join()
    if refusal is not None:
        raise RefusedRequest(*refusal)
    found: T = result
    return found


def _answer(function: Callable[[], T], result: Connection) -> None:
    signal.set_wakeup_fd(-1)  # it is the parent's, as are the handlers
    for number in CAUGHT:
        signal.signal(number, signal.SIG_DFL)
    try:
        result.send((function(), None))
    except Refused as refused:
        result.send((None, (refused.problems, refused.details)))
