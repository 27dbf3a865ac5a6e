"""Text output for people: numbers and tables. Imports no torch."""

from __future__ import annotations

import contextlib
import math
import os
import stat
from collections.abc import Mapping, Sequence
from datetime import timedelta


def compact(number: float) -> str:
    """Return a number with three digits and a unit prefix: 370, 45.2k, 1.23M."""
    if not math.isfinite(number):
        return str(number)
    for magnitude in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5 or magnitude == "T":
            break
        number /= 1000
    digits = 0 if abs(number) >= 99.95 else 1 if abs(number) >= 9.995 else 2
    text = f"{number:.{digits}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + magnitude


def clock(seconds: float) -> str:
    """Return a duration in clock format: 0:21, 1:02:03, or 51:00:00 beyond a day."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def table(rows: Mapping[str, object]) -> str:
    """Return one line per entry, names left-aligned and values right-aligned; None entries are left out.

    Integers get thousands separators, floats four digits, durations clock format; strings are unchanged.
    """
    return "\n".join(aligned([(name, _cell(value)) for name, value in rows.items() if value is not None], [0]))


def aligned(rows: Sequence[Sequence[str]], texts: Sequence[int] = ()) -> list[str]:
    """Return rows in aligned columns: those with an index in ``texts`` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index in texts else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _cell(value: object) -> str:
    if isinstance(value, timedelta):
        return clock(value.total_seconds())
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    return str(value)


def leave_terminal() -> None:
    """Discard what this process prints to a terminal from now on: it is closed, and each write would fail."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):  # it is no stream any more
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
