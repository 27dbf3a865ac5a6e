"""The last results of every benchmark, for measured/benchmarks.md, and how costs grow, for measured/growth.md.

python -m tests.engine.tables.benchmarks        # fills the first from benchmarks/results, and measures the second
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks import growth
from tests.engine.conftest import CHECKOUT
from tests.engine.tables.documents import code, made, markdown, put

RESULTS = CHECKOUT / "benchmarks" / "results"
HEAD = ["command", "measured", "ms", "against", "ms", "ratio", "to reach", "date", "load"]


def main() -> None:
    put("benchmarks", markdown(HEAD, [row for path in sorted(RESULTS.glob("*.json")) for row in _rows(path)]))
    table = markdown(growth.HEAD, [growth.cells(found) for found in growth.growths()])
    put("growth", [made("python -m tests.engine.tables.benchmarks"), "", *table])


def _rows(path: Path) -> Iterable[list[str]]:
    result = json.loads(path.read_text())
    for row in result["rows"]:
        measured, against = (_ms(row[key]) for key in ("milliseconds", "against_milliseconds"))
        target = f"{row['target']}, missed" if row["reached"] is False else row["target"]
        of_row = [row["name"], measured, row["against"], against, f"{row['ratio']:.3f}", target]
        yield [code(f"python -m benchmarks.{path.stem}"), *of_row, result["date"], str(result["machine"]["load"])]


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:,.0f}"


if __name__ == "__main__":
    main()
