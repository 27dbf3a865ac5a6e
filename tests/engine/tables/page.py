"""A page that is made: its head, its tables, and code in their cells."""

from __future__ import annotations

from collections.abc import Iterable

MADE = "<!-- made by `python -m tests.engine.tables.reference` -->"


def page(title: str, *paragraphs: str) -> str:
    return "\n\n".join((f"# {title}", MADE, *paragraphs)) + "\n"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = (head, ("---",) * len(head), *rows)
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def code(text: str) -> str:
    """Return a text as code, of one line."""
    return f"`{' '.join(text.split())}`" if text else ""
