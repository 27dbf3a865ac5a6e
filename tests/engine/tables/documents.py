"""Tables made from real runs, kept in measured/ as pages, with their cells beside as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.engine.conftest import CHECKOUT

MEASURED = CHECKOUT / "tests" / "engine" / "tables" / "measured"


def put(name: str, lines: list[str]) -> None:
    """Replace what a page of measured/ has below its introduction."""
    path, mark = MEASURED / f"{name}.md", "<!-- measured -->\n"
    introduction, _, _ = path.read_text().partition(mark)
    path.write_text("\n".join([f"{introduction}{mark}", *lines]).rstrip() + "\n")


def markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def outcome(found: str, reasons: list[str]) -> str:
    """Return the cell of a run that trains, or the number of the reason why it does not, which joins the others."""
    if found == "trains":
        return found
    if found not in reasons:
        reasons.append(found)
    return f"no ({reasons.index(found) + 1})"


def made(command: str) -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "deepspeed"))
    return f"{date.today()}, {packages}, two CPU cores: `{command}`."


def keep(path: Path, cells: Any) -> None:
    path.write_text(json.dumps(cells, indent=1, ensure_ascii=False) + "\n")


# A page that is made: its head, its tables, and code in their cells


MADE = "<!-- made by `python -m tests.engine.tables.reference` -->"


def page(title: str, *paragraphs: str) -> str:
    return "\n\n".join((f"# {title}", MADE, *paragraphs)) + "\n"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = (head, ("---",) * len(head), *rows)
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def code(text: str) -> str:
    """Return a text as code, of one line."""
    return f"`{' '.join(text.split())}`" if text else ""
