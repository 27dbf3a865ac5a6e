"""Tables made from real runs, kept in docs/ between two comments, with their cells beside as JSON."""

from __future__ import annotations

import json
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.engine.conftest import CHECKOUT

DOCS = CHECKOUT / "docs"


def put(document: str, name: str, lines: list[str]) -> None:
    """Replace what stands between `<!-- name -->` and `<!-- end of name -->`."""
    path = DOCS / document
    before, _, rest = path.read_text().partition(f"<!-- {name} -->\n")
    _, _, after = rest.partition(f"<!-- end of {name} -->\n")
    path.write_text("\n".join([f"{before}<!-- {name} -->", *lines, f"<!-- end of {name} -->", after]))


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
