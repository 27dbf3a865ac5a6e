"""The page of measurements: every number that the documents tell of a run or a machine, with what made it, and when.

python -m tests.engine.tables.reference         # makes it with the pages of reference, of what lies in files
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.engine.conftest import CHECKOUT
from tests.engine.tables.claims import HELD, MEASURED, Claim
from tests.engine.tables.documents import code, page, table

RESULTS = CHECKOUT / "benchmarks" / "results"
DOCS = CHECKOUT / "docs"


TABLES = {  # between two comments in a document: the line above each says what made it, and when
    "matrix": "strategies.md",
    "resume": "checkpoints.md",
    "failures": "debugging.md",
}


def text() -> str:
    """Return the page."""
    return page(
        "Measurements",
        "Every number that these documents tell of a run or of a machine, with the command that made it and the "
        "date. Two CPU cores, which other programs used as well; what GPUs have shown: [GPUs](../speed.md#gpus).",
        "## Benchmarks",
        f"Medians in milliseconds, and the median of the paired ratios ([how](../speed.md#benchmarks)); {_versions()}.",
        _benchmarks(),
        "## Tables from real runs",
        _tables(),
        "## Held by a test",
        "Each run of CI shows them anew, and fails where they no longer hold.",
        _claims(HELD, "test"),
        "## Measured once",
        "Where no command is named, none was kept: calls were timed one by one, or allocations counted, in a script.",
        _claims(MEASURED, "command"),
    )


def _benchmarks() -> str:
    head = ("command", "measured", "ms", "against", "ms", "ratio", "to reach", "date", "load")
    return table(head, (row for path in sorted(RESULTS.glob("*.json")) for row in _rows(path)))


def _versions() -> str:
    """Return the packages of all results: those of which there are several versions have all of them."""
    machines = [json.loads(path.read_text())["machine"] for path in RESULTS.glob("*.json")]
    names = [name for name in machines[0] if name not in ("cores", "load")]
    return ", ".join(f"{name} {' or '.join(sorted({machine[name] for machine in machines}))}" for name in names)


def _rows(path: Path) -> Iterable[tuple[str, ...]]:
    result = json.loads(path.read_text())
    command, of_file = code(f"python -m benchmarks.{path.stem}"), (result["date"], str(result["machine"]["load"]))
    for row in result["rows"]:
        missed = ", missed" if row["reached"] is False else ""
        times = _ms(row["milliseconds"]), _ms(row["against_milliseconds"])
        measured = row["name"], times[0], row["against"], times[1], f"{row['ratio']:.3f}", f"{row['target']}{missed}"
        yield (command, *measured, *of_file)
    if memory := result.get("memory"):
        told = f"memory of its own after {memory['gib']:g} GiB of shards: {memory['own_mib']:.1f} MiB"
        yield (command, told, "", "", "", "", "", *of_file)


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:,.0f}"


def _tables() -> str:
    found = {
        "matrix": lambda: _matrix(json.loads((DOCS / "matrix.json").read_text())["cpu"]),
        "resume": lambda: _resume(json.loads((DOCS / "resume.json").read_text())),
        "failures": lambda: f"{len(_between('failures').splitlines()) - 4} failures, in seconds and exit codes",
    }
    rows = []
    for name, document in TABLES.items():
        made = re.search(r"^(\d{4}-\d\d-\d\d), .*`(.*)`", _between(name), re.MULTILINE)
        assert made is not None, document
        rows.append((code(made[2]), found[name](), f"[{document}](../{document})", made[1]))
    return table(("command", "what came of it", "table", "date"), rows)


def _between(name: str) -> str:
    _, _, rest = (DOCS / TABLES[name]).read_text().partition(f"<!-- {name} -->\n")
    return rest.partition(f"<!-- end of {name} -->")[0]


def _matrix(cells: dict[str, dict[str, str]]) -> str:
    trains = [found == "trains" for row in cells.values() for found in row.values()]
    told = f"{sum(trains)} pairs with a precision train, {trains.count(False)} are refused"
    return f"{len(cells)} strategies on CPUs: {told}"


def _resume(cells: dict[str, dict[str, Any]]) -> str:
    largest = max(float(found) for row in cells.values() for found in row.values())
    return f"{sum(map(len, cells.values()))} pairs of strategies: the largest difference is {largest:.0e}"


def _claims(claims: Iterable[Claim], by: str) -> str:
    dated = any(claim.date for claim in claims)
    rows = (_row(claim)[: 4 if dated else 3] for claim in claims)
    return table(("number", "told in", by, "date")[: 4 if dated else 3], rows)


def _row(claim: Claim) -> tuple[str, ...]:
    name = claim.document.removeprefix("docs/")
    link = f"[{name}](../{name})" if claim.document != name else f"[{name}](../../{name})"
    return claim.words, link, code(claim.shown_by), claim.day
