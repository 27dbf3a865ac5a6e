"""Where a rank stands is told by the user's own line, wherever the user's package lies, and whether it waits there."""

from __future__ import annotations

import contextlib
import linecache
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import lightswitch
from lightswitch.failures.crash_report import is_waiting, thread_position


def test_a_package_beside_the_engine_is_the_users_own() -> None:
    beside = str(Path(lightswitch.__file__).parents[1] / "birdsong/net.py")
    names: dict[str, Any] = {"thread_position": thread_position}
    exec(compile("def training_step():\n    return thread_position()\n", beside, "exec"), names)
    assert names["training_step"]().location.startswith(f"{beside}:2 in training_step")


class Loss:
    """A tensor on a device that does not answer: its methods are C's, and return once it is freed."""

    def __init__(self, freed: threading.Lock) -> None:
        type(self).__bool__ = type(self).__float__ = type(self).item = type(self).tolist = freed.acquire

    def __add__(self, other: object) -> Loss:
        return self


WAITING = (
    "loss.item()",
    "total = 1.0 + (loss + [len('ü')]).item()",
    "rows = sorted(\n        loss\n        .tolist()\n    )",
    "while loss:\n        break",
    "if not loss:\n        total = 1",
    "total = [value.item() for value in [loss]]",
    "torch.nn.functional.relu(loss.item())",
)
WORKING = (
    "time.sleep(0.5)",
    "jobs.get(timeout=0.5)",
    "freed.acquire()",
)
EXACT = (
    "time.sleep(float(0.5))",  # a wait's name in the same line
    "freed.acquire(True, float(9))",
    "for number in range(10**9):\n        number += 1\n        if ended.is_set():\n            break",
)


@contextmanager
def _standing(body: str) -> Iterator[FrameType]:
    """The innermost frame of a thread that stands in a step."""
    freed, ended = threading.Lock(), threading.Event()
    freed.acquire()
    names: dict[str, Any] = {"torch": torch, "time": time, "jobs": queue.Queue(), "freed": freed, "ended": ended}
    source = f"def step(loss, total=0):\n    {body}\n"
    linecache.cache["step.py"] = (len(source), None, source.splitlines(keepends=True), "step.py")
    exec(compile(source, "step.py", "exec"), names)
    thread = threading.Thread(target=_run, args=(names["step"], Loss(freed)), daemon=True)
    thread.start()
    time.sleep(0.2)
    try:
        yield sys._current_frames()[thread.ident or 0]
    finally:
        ended.set()
        freed.release()
        thread.join()


def _run(step: Callable[[Loss], None], loss: Loss) -> None:
    with contextlib.suppress(TypeError, queue.Empty):  # a lock's True is no loss
        step(loss)


@pytest.mark.parametrize("body", WAITING)
def test_a_call_that_waits_for_the_device_is_a_wait_for_other_ranks(body: str) -> None:
    with _standing(body) as frame:
        assert is_waiting(frame)


@pytest.mark.parametrize("body", WORKING)
def test_any_other_call_is_not(body: str) -> None:
    with _standing(body) as frame:
        assert not is_waiting(frame)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python tells which line it is at, and not which part of it")
@pytest.mark.parametrize("body", EXACT)
def test_the_call_at_hand_decides_and_not_its_line(body: str) -> None:
    with _standing(body) as frame:
        assert not is_waiting(frame)
