"""Lines of Python at which a process waits for its device, and so for the collectives that the device is in."""

from __future__ import annotations

import ast
import dis
import linecache
import re
import sys
from types import FrameType

_WAIT = {  # calls of C that copy to the host, or have a size that follows from values (torch.cuda.set_sync_debug_mode)
    *("item", "tolist", "cpu", "numpy", "to", "copy_", "synchronize", "wait", "bool", "int", "float"),
    *("any", "all", "equal", "allclose", "is_nonzero", "nonzero", "masked_select", "unique", "unique_consecutive"),
    *("bincount", "repeat_interleave"),
}


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
