"""Tables as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from lightswitch.errors import printable
from lightswitch.monitoring.quantities import clock


def table(rows: Mapping[str, object]) -> str:
    """Return one line an entry, names to the left and values to the right; entries that are None are left out.

    Integers get thousands separators, floats four digits, durations a clock; strings stay as they are.
    """
    return "\n".join(aligned([(name, _cell(value)) for name, value in rows.items() if value is not None], [0]))


def aligned(rows: Sequence[Sequence[str]], texts: Sequence[int] = ()) -> list[str]:
    """Return rows in columns, of which those in ``texts`` begin at one place, and the others end at one."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index in texts else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def escaped(text: str) -> str:
    """Return a text as one line of Markdown, in which no HTML, link or image begins, and no cell of a table ends."""
    line = " ".join(printable(text).split())
    for mark, instead in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("](", "]\\(")):
        line = line.replace(mark, instead)
    return line


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
