"""Results of a run as text."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from lightswitch.monitoring.quantities import clock


def table(rows: Mapping[str, object]) -> str:
    """Return one line an entry, names to the left and values to the right; entries that are None are left out.

    Integers get thousands separators, floats four digits, durations a clock; strings stay as they are.
    """
    cells = {name: _cell(value) for name, value in rows.items() if value is not None}
    name_width = max(map(len, cells), default=0)
    value_width = max(map(len, cells.values()), default=0)
    return "\n".join(f"{name:<{name_width}}  {text:>{value_width}}" for name, text in cells.items())


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
