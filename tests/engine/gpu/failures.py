"""What a user sees of failures between ranks that wait for one another in NCCL."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.engine.gpu.cells import Cell, Piece, Result, Scale
from tests.engine.tables.failures import CASES, LAUNCHERS, local
from tests.engine.tables.failures import Cell as Seen

MOST_SECONDS = 60.0  # from the failure until no process is left
# by the name of the case: the first line that the user reads; the exit code is torchrun's own under it
LINES = {
    "an exception in rank 1": r"rank 1 of 2 on node failed: RuntimeError: this is the bug",
    "`kill -9` of rank 1": r"rank 1 of 2 on node failed: process \d+ (was killed|ended without an error message)",
    "rank 1 hangs (given up after 5 s)": r"rank 1 of 2 on node hangs at tests/engine/failures/failing\.py",
    "the disk of rank 1 is full when it saves": r"error: the checkpoint could not be written: rank 1: ",
}
CODES = {"the disk of rank 1 is full when it saves": {"python": "2", "torchrun": "1"}}


def piece(scale: Scale) -> Piece:
    """Return a cell for each failure under each launcher."""
    lacks = "" if scale.devices > 1 else "needs 2 GPUs"
    pairs = [(case, launcher) for case in LINES for launcher in ("python", "torchrun")]
    chosen = pairs[:1] if scale.is_tiny else pairs
    return Piece("failures", [Cell(f"{case}: {by}", partial(_seen, scale, case, by), lacks) for case, by in chosen])


def _seen(scale: Scale, name: str, launcher: str, folder: Path, seconds: float, so_far: Mapping[str, Result]) -> Result:
    case = replace(CASES[name], arguments=(*CASES[name].arguments, f"trainer.accelerator={scale.accelerator}"))
    return judged(name, launcher, local(case, LAUNCHERS[launcher], folder / "run", seconds))


def judged(name: str, launcher: str, cell: Seen) -> Result:
    """Return what was seen of a failure under a launcher, and what of it is not as expected."""
    code = CODES.get(name, {}).get(launcher, "1")
    problems = [
        *([] if re.match(LINES[name], cell.line) else [f"the first line is {cell.line!r}"]),
        *([] if cell.code == code else [f"exit code {cell.code}, expected {code}"]),
        *([] if cell.seconds <= MOST_SECONDS else [f"{cell.seconds:.0f} s until all was gone"]),
    ]
    return Result({"seconds": round(cell.seconds, 1), "code": cell.code, "line": cell.line}, "; ".join(problems))
