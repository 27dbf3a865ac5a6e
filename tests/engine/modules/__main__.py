"""Every module of the catalogue under every way: what holds and what is refused, for measured/modules.md.

python -m tests.engine.modules                 # all, in about an hour of two cores
python -m tests.engine.modules generative      # those of a file, or some by name: their rows are made anew
python -m tests.engine.modules MoCo --ways ddp fsdp  # prints cells, and leaves the page alone
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.engine.modules.catalogue import CATALOGUE, FIELDS, Entry
from tests.engine.modules.walk import WAYS, Cell, walk
from tests.engine.tables import documents
from tests.pool import Pool

CELLS = documents.MEASURED / "modules.json"
Row = dict[str, Cell]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE_OR_FILE")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    arguments = parser.parse_args()
    chosen = [name for name, entry in CATALOGUE.items() if not arguments.modules or _is_named(entry, arguments.modules)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.simplefilter("ignore")
    with TemporaryDirectory() as folder, contextlib.closing(Pool(Path(folder))) as pool:
        for name in chosen:
            row = _row(pool, name, arguments.ways)
            if arguments.ways == list(WAYS):
                _put(name, row)


def _is_named(entry: Entry, words: list[str]) -> bool:
    return entry.name in words or entry.module.__module__.rpartition(".")[2] in words


def _row(pool: Pool, name: str, ways: list[str]) -> Row:
    row = {}
    with walk(pool) as walked:
        for way in ways:
            if way == "fsdp_tp" and not CATALOGUE[name].cuts:
                continue
            start = time.monotonic()
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                row[way] = cell = walked.cell(name, way)
            print(f"{name} × {way}: {cell.outcome} {cell.told} ({time.monotonic() - start:.0f} s)", flush=True)
    return row


def _put(name: str, row: Row) -> None:
    kept = json.loads(CELLS.read_text()) if CELLS.exists() else {}
    kept[name] = {way: [cell.outcome, cell.told] for way, cell in row.items()}
    kept = {name: kept[name] for name in CATALOGUE if name in kept}
    documents.keep(CELLS, kept)
    documents.put("modules", page({name: _cells(row) for name, row in kept.items()}))


def _cells(row: dict[str, list[str]]) -> Row:
    return {way: Cell(*cell) for way, cell in row.items()}


def page(rows: dict[str, Row]) -> list[str]:
    """Return a table for each field, and the lines of what is refused."""
    told: dict[str, int] = {}
    lines = [documents.made("python -m tests.engine.modules")]
    for field in FIELDS:
        entries = [entry for entry in field.entries if entry.name in rows]
        cells = [[_named(entry), *(_text(rows[entry.name].get(way), told) for way in WAYS)] for entry in entries]
        lines += ["", f"### {field.title}", "", *documents.markdown(["module", *WAYS], cells)]
    lines += ["", "### What the numbers in brackets say", ""]
    return lines + [f"{number}. {line}" for line, number in told.items()]


def _named(entry: Entry) -> str:
    held = f" Held to {entry.reference}: {entry.because}." if entry.because else ""
    return f"**{entry.name}**: {entry.sentence}{held}".replace("|", "\\|")


def _text(cell: Cell | None, told: dict[str, int]) -> str:
    """Return a cell's text, with the number of the line that says more."""
    if cell is None:
        return ""
    if cell.outcome == "holds":
        return cell.told
    return f"{cell.outcome} [{told.setdefault(cell.told, len(told) + 1)}]"


if __name__ == "__main__":
    main()
