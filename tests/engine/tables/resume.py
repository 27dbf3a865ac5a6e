"""From every way to every other: a run that is saved under one and goes on under another, against one that is not.

python -m tests.engine.tables.resume            # fills measured/resume.md
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.engine.conftest import Finished, Train, runs_in
from tests.engine.tables import documents
from tests.engine.tiny import LANGUAGE
from tests.engine.ways import WAYS

RUN = (*LANGUAGE, "micro_batch_size=6", "run_id=mine", "trainer.val_check_interval=4", "scheduler.total_steps=16")
SAVED, END = 7, 16  # steps: the first lies between two validations
METRICS = ("train/loss", "val/loss", "samples")


def go_on(train: Train, way: str, folder: Path | None, stop: int = END) -> Finished:
    """Without a folder: from the beginning."""
    return train(*RUN, *WAYS[way].switches, f"trainer.max_steps={stop}", ranks=WAYS[way].ranks, folder=folder)


def difference(expected: Finished, found: Finished) -> float:
    """The largest of any metric at any step; infinite where steps are missing."""
    columns = [(expected.column(name), found.column(name)) for name in METRICS]
    if any(one.keys() != other.keys() for one, other in columns):
        return float("inf")
    return max(abs(one[step] - other[step]) for one, other in columns for step in one)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        train = runs_in(Path(folder))
        uninterrupted = go_on(train, "single", None)
        cells = {before: _row(train, before, uninterrupted, Path(folder)) for before in WAYS}
    head = ["from \\ to", *WAYS]
    rows = [[before, *(f"{found:.0e}" if found else "0" for found in row.values())] for before, row in cells.items()]
    documents.keep(documents.MEASURED / "resume.json", cells)
    told = [documents.made("python -m tests.engine.tables.resume"), "", *documents.markdown(head, rows)]
    documents.put("resume", told)


def _row(train: Train, before: str, uninterrupted: Finished, folder: Path) -> dict[str, float]:
    begun = go_on(train, before, None, SAVED)
    row = {}
    for after in WAYS:
        with tempfile.TemporaryDirectory(dir=folder) as again:
            shutil.copytree(begun.folder, again, dirs_exist_ok=True)
            row[after] = difference(uninterrupted, go_on(train, after, Path(again)))
        print(f"{before} to {after}: {row[after]:.1e}", flush=True)
    return row


if __name__ == "__main__":
    main()
