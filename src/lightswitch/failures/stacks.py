"""Where a rank stands: its threads' stacks, whether it waits for other ranks, the collectives that it has entered."""

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
from pathlib import Path
from types import FrameType

_ENGINE = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib")})
_WAITING = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/", "/torch/cuda/")  # for the other ranks
_WAIT = {  # calls of C that copy to the host, or have a size that follows from values (torch.cuda.set_sync_debug_mode)
    *("item", "tolist", "cpu", "numpy", "to", "copy_", "synchronize", "wait", "bool", "int", "float"),
    *("any", "all", "equal", "allclose", "is_nonzero", "nonzero", "masked_select", "unique", "unique_consecutive"),
    *("bincount", "repeat_interleave"),
}


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
        f"{at.filename}:{at.lineno} in {at.name}: {at.line}", waits, oom_kills(), collectives_entered()
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


def waits_for_device(frame: FrameType) -> bool:
    """Return whether the innermost frame of a stack stands in a call that waits for a device, or asks a tensor's truth.

    Such calls are C's, and have no frame of their own.
    """
    instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    if instruction.startswith(("TO_BOOL", "UNARY_NOT")):
        return True
    if re.search("JUMP.*_IF_", instruction):  # as in `if loss > 3`; Python looks for signals where it jumps back
        return "BACKWARD" not in instruction
    return not _WAIT.isdisjoint(_called(frame))


def _called(frame: FrameType) -> set[str]:
    """Return the name of the function that a frame is calling; before Python 3.11, all that its line calls."""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    if sys.version_info < (3, 11):
        return set(re.findall(r"(\w+)\(", "".join(lines[frame.f_lineno - 1 : frame.f_lineno])))
    try:
        call = ast.parse(f"({_source(frame, lines)})", mode="eval").body
    except (SyntaxError, ValueError):  # the file has changed since
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
    """Return how many collectives this process has entered in each of its process groups, by the group's name.

    NCCL is asynchronous: a rank enters a collective and goes on until something needs its result. So the rank that the
    others wait for has entered fewer collectives than they have. Reading the numbers waits for no device. They are
    those of torch's flight recorder.
    """
    from torch.distributed.distributed_c10d import _world  # here: a start that is refused imports no torch

    found: dict[str, int] = {}
    for group in list(_world.pg_map):
        with contextlib.suppress(RuntimeError):  # a back-end that does not count
            backends = {id(backend): backend for backend in map(group._get_backend, group._device_types)}
            counts = [one._get_sequence_number_for_group() for one in backends.values()]  # type: ignore[attr-defined]  # torch's stub lacks it
            found[group.group_name] = sum(counts)
    return found
