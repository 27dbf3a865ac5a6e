"""Tables as text: aligned for a terminal, or as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from lightswitch.compare.tables import Table
from lightswitch.errors import printable
from lightswitch.monitoring.summary import aligned, escaped


def terminal(tables: Sequence[Table], summary: Sequence[str]) -> str:
    """Return tables in aligned columns, and the summary below them."""
    return printable("\n\n".join([*map(_aligned, tables), "\n".join(summary)]) + "\n")


def _aligned(table: Table) -> str:
    texts = [index for index, side in enumerate(table.alignment) if side == "l"]
    lines = aligned([table.columns, *table.rows], texts) if table.rows else []
    return "\n".join([table.title, *lines, *table.notes])


def markdown(title: str, tables: Sequence[Table], summary: Sequence[str]) -> str:
    """Return the same as a Markdown document."""
    parts = [f"# {escaped(title)}", *map(escaped, summary)]
    for table in tables:
        parts += [f"## {table.title}", *(["\n".join(_rows(table))] if table.rows else []), *map(escaped, table.notes)]
    return "\n\n".join(parts) + "\n"


def _rows(table: Table) -> list[str]:
    rules = ("---:" if side == "r" else "---" for side in table.alignment)
    cells = [table.columns, tuple(rules), *table.rows]
    return [f"| {' | '.join(map(escaped, row))} |" for row in cells]
