"""From every way to every other: a run that is saved under one and goes on under another."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from tests.engine.conftest import Finished, runs_in
from tests.engine.gpu import ways
from tests.engine.gpu.cells import Cell, Piece, Result, Scale
from tests.engine.gpu.parity import LARGEST
from tests.engine.tables.resume import END, RUN, SAVED, difference
from tests.engine.ways import Way


def piece(scale: Scale) -> Piece:
    """Return a cell for each way that saves: all others go on from there, so that it is run once."""
    cells = [Cell(f"from {name}", partial(_row, scale, name), limit_seconds=480) for name in ways.there(scale)]
    return Piece("resume", cells, at_once=2)


def _row(scale: Scale, before: str, folder: Path, seconds: float, so_far: Mapping[str, Result]) -> Result:
    there, end = ways.there(scale), time.monotonic() + seconds

    def go_on(way: Way, stop: int, saved: Path | None = None) -> Finished:
        train = runs_in(folder)
        run = (*RUN, *way.switches, f"trainer.accelerator={scale.accelerator}", f"trainer.max_steps={stop}")
        return train(*run, ranks=way.ranks, folder=saved, timeout_seconds=int(end - time.monotonic()))

    uninterrupted = go_on(there[ways.ALONE], END)
    begun = go_on(there[before], SAVED, folder / "begun")
    found = {}
    for number, (name, way) in enumerate(there.items()):
        again = folder / f"again_{number}"
        shutil.copytree(begun.folder, again)
        found[name] = difference(uninterrupted, go_on(way, END, again))
    most = LARGEST[scale.accelerator]
    wrong = [f"{name} by {value:.1e}" for name, value in found.items() if not value <= most]
    return Result(found, f"more than {most} off: {', '.join(wrong)}" if wrong else "")
