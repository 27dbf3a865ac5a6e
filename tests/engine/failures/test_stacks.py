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
from traceback import walk_stack
from types import FrameType
from typing import Any

import pytest
import torch

import lightswitch
from lightswitch.failures.stacks import is_waiting, thread_position


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
    "time.sleep(3600)",
    "jobs.get(timeout=3600)",
    "freed.acquire()",
)
EXACT = (
    "time.sleep(float(3600))",  # a wait's name in the same line
    "freed.acquire(True, float(3600))",
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
    try:
        yield _frame_that_stands(thread)
    finally:
        ended.set()
        freed.release()
        names["jobs"].put(None)
        if "sleep" not in body:  # one that sleeps ends with this process
            thread.join()


def _frame_that_stands(thread: threading.Thread) -> FrameType:
    """Return a thread's innermost frame once the thread is in the step, and has not moved for a while, or is in a
    loop."""
    places: list[tuple[str, int]] = []  # in the step
    while True:
        frame = sys._current_frames()[thread.ident or 0]
        if any(above.f_code.co_filename == "step.py" for above, _ in walk_stack(frame)):
            places.append((frame.f_code.co_name, frame.f_lasti))
            is_in_loop = len(set(places)) > 1 and len(places) > 50
            if (len(places) >= 20 and len({*places[-20:]}) == 1) or is_in_loop:
                return frame
        time.sleep(0.01)


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
