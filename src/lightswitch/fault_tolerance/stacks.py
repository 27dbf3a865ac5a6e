"""Positions of this process's threads in the code, and the node's out-of-memory kills."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from lightswitch.fault_tolerance import collectives
from lightswitch.fault_tolerance.device_waits import waits_for_device

_ENGINE = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib")})
_WAITING = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/", "/torch/cuda/")  # for the other ranks


@dataclass(frozen=True)
class ThreadPosition:
    """The line of code that a rank's main thread is at.

    Args:
        location: file, line and function, of the user's own code if the stack holds any.
        waits: whether it is in a collective, or in a call that ends with one, or waits for its device to do so.
        oom_kills: how many processes the node's kernel has killed for lack of memory since it booted.
        collectives: how many the rank has entered, by process group.
    """

    location: str
    waits: bool
    oom_kills: int
    collectives: Mapping[str, int] = field(default_factory=dict)


def thread_position() -> ThreadPosition:
    """Return the main thread's position, from any thread."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    stack, waits = traceback.extract_stack(frame), is_waiting(frame)
    others = (*_LIBRARIES, _ENGINE, os.path.abspath(sys.argv[0]), "<")
    own = [] if waits else [frame for frame in stack if not frame.filename.startswith(others)]
    at = (own or stack)[-1]
    return ThreadPosition(
        f"{at.filename}:{at.lineno} in {at.name}: {at.line}", waits, oom_kills(), collectives.entered()
    )


def is_waiting(frame: FrameType) -> bool:
    """Return whether the innermost frame of a stack stands where it waits for other ranks."""
    return any(part in frame.f_code.co_filename for part in _WAITING) or waits_for_device(frame)


def all_stacks() -> str:
    """Return the stacks of all threads, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != threading.main_thread().ident)
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames
    )


def oom_kills() -> int:
    """Return how many processes Linux has killed for lack of memory, in any control group; 0 on other systems."""
    try:
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return 0
    return int(counts.get("oom_kill", 0))
