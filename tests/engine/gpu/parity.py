"""The loss curve of every way against that of a single device."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from tests.engine.conftest import Finished, runs_in
from tests.engine.curves import largest_difference
from tests.engine.gpu import ways
from tests.engine.gpu.cells import Cell, Piece, Result, Scale
from tests.engine.tiny import LANGUAGE, NO_CHECKPOINTS
from tests.engine.ways import Way

# At 32-true, over 50 steps. GPUs add in another order for each shape of a batch, and so differ by more than CPUs do.
LARGEST = {"cpu": 1e-5, "gpu": 1e-4}


def piece(scale: Scale) -> Piece:
    """Return a cell for each way."""
    cells = [Cell(name, partial(_compared, scale, name)) for name in ways.there(scale) if name != ways.ALONE]
    return Piece("parity", [*cells, *(Cell(name, _never, lacks) for name, lacks in ways.lacking(scale))], at_once=2)


def _compared(scale: Scale, name: str, folder: Path, seconds: float, so_far: Mapping[str, Result]) -> Result:
    train, end, most = runs_in(folder), time.monotonic() + seconds, LARGEST[scale.accelerator]

    def under(way: Way) -> Finished:
        run = (*LANGUAGE, *NO_CHECKPOINTS, *way.switches, f"trainer.accelerator={scale.accelerator}")
        return train(*run, ranks=way.ranks, timeout_seconds=int(end - time.monotonic()))

    alone = under(ways.there(scale)[ways.ALONE])
    found = largest_difference(under(ways.there(scale)[name]), alone)
    return Result({"largest_difference": found}, "" if found <= most else f"differs by {found:.1e}, more than {most}")


def _never(folder: Path, seconds: float, so_far: Mapping[str, Result]) -> Result:
    raise AssertionError("it lacks something")
