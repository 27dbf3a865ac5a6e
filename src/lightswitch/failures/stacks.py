"""Position of a rank: its threads' stacks, whether it waits for other ranks, and the collectives it has entered."""

from __future__ import annotations

import ast
import contextlib
import dis
import linecache
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import FrameType

_ENGINE = str(Path(__file__).parents[1])
_PYTHON = sysconfig.get_paths()["stdlib"]
_INSTALLED = {"site-packages", "dist-packages"}  # of this environment, or of the system's, which it may include
_WAITING = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/", "/torch/cuda/")  # for other ranks
_WAIT = {  # C functions that copy to the host, or whose output size depends on values (torch.cuda.set_sync_debug_mode)
    *("item", "tolist", "cpu", "numpy", "to", "copy_", "synchronize", "wait", "bool", "int", "float"),
    *("any", "all", "equal", "allclose", "is_nonzero", "nonzero", "masked_select", "unique", "unique_consecutive"),
    *("bincount", "repeat_interleave"),
}


@dataclass(frozen=True)
class ThreadPosition:
    """Line of code that a rank's main thread is executing.

    Args:
        location: file, line, function and source line: of the user's code if the stack contains any, else of the
            innermost frame. Where a rank waits in a call of the user's code, the waiting function follows.
        waits: whether the rank is in distributed, autograd or CUDA code of torch, or in a call that waits for a device:
            it may wait for other ranks.
        oom_kills: number of processes that the node's kernel has killed for lack of memory since boot.
        collectives: number of collectives that the rank has entered, by process group.
    """

    location: str
    waits: bool
    oom_kills: int
    collectives: Mapping[str, int] = field(default_factory=dict)


def thread_position() -> ThreadPosition:
    """Return the main thread's position. Can be called in any thread."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    stack, waits = traceback.extract_stack(frame), is_waiting(frame)
    entered = (
        at for at, frame in enumerate(stack) if frame.filename.startswith(_ENGINE) and frame.filename != __file__
    )
    within_run = stack[next(entered, 0) :]  # a script may have called the run
    own = [frame for frame in within_run if not is_of_others(frame.filename)]
    at = (own or stack)[-1]
    within = f", in {stack[-1].name}" if waits and at is not stack[-1] else ""
    return ThreadPosition(
        f"{at.filename}:{at.lineno} in {at.name}: {at.line}{within}", waits, oom_kills(), collectives_entered()
    )


@lru_cache
def is_of_others(file: str) -> bool:
    """Return whether a file of code is the engine's, the script's, an installed package's or Python's."""
    is_installed = not _INSTALLED.isdisjoint(Path(file).parts)
    return is_installed or file.startswith((_PYTHON, _ENGINE, os.path.abspath(sys.argv[0]), "<"))


def is_waiting(frame: FrameType) -> bool:
    """Return whether a frame, the innermost of its stack, is in code that may wait for other ranks."""
    return any(part in frame.f_code.co_filename for part in _WAITING) or waits_for_device(frame)


def all_stacks() -> str:
    """Return the stacks of all threads as text, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != threading.main_thread().ident)
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames
    )


def oom_kills() -> int:
    """Return how many processes Linux has killed for lack of memory, in any cgroup; 0 on other systems."""
    try:
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return 0
    return int(counts.get("oom_kill", 0))


def waits_for_device(frame: FrameType) -> bool:
    """Return whether a frame, the innermost of its stack, is in a call that waits for a device or in a truth test.

    Such calls run in C and have no Python frame.
    """
    instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    if instruction.startswith(("TO_BOOL", "UNARY_NOT")):
        return True
    if re.search("JUMP.*_IF_", instruction):  # as in `if loss > 3`; at backward jumps, Python handles signals
        return "BACKWARD" not in instruction
    return not _WAIT.isdisjoint(_called(frame))


def _called(frame: FrameType) -> set[str]:
    """Return the name of the function that a frame is calling."""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    try:
        call = ast.parse(f"({_source(frame, lines)})", mode="eval").body
    except (SyntaxError, ValueError):  # the file has changed since it was imported
        return set()
    function = call.func if isinstance(call, ast.Call) else None
    return {getattr(function, "attr", getattr(function, "id", ""))}


def _source(frame: FrameType, lines: list[str]) -> str:
    """Return the expression that a frame is evaluating."""
    first, last, start, end = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if first is None or last is None or not 0 < first <= last <= len(lines):
        return ""
    within = [line.encode() for line in lines[first - 1 : last]]  # columns count bytes
    within[-1] = within[-1][:end]
    within[0] = within[0][start:]
    return b"".join(within).decode(errors="replace")


def collectives_entered() -> dict[str, int]:
    """Return the number of collectives that this process has entered, by the name of the process group.

    NCCL is asynchronous: a rank enters a collective and continues until an operation needs the result. So a rank that
    the others wait for has entered fewer collectives than they have. The numbers are those of torch's flight recorder;
    reading them does not wait for a device.
    """
    from torch.distributed.distributed_c10d import _world  # here: a refused start does not import torch

    found: dict[str, int] = {}
    for group in list(_world.pg_map):
        with contextlib.suppress(RuntimeError):  # a backend that does not count collectives
            backends = {id(backend): backend for backend in map(group._get_backend, group._device_types)}
            counts = [one._get_sequence_number_for_group() for one in backends.values()]  # type: ignore[attr-defined]  # torch's stub lacks it
            found[group.group_name] = sum(counts)
    return found
