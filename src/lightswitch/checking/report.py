"""Words of a check: its table, a line for each thing that differs, and check.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightswitch.checking.causes import Cause
from lightswitch.checking.table import HEADINGS, Cell
from lightswitch.checking.table import as_data as cell_data
from lightswitch.monitoring.display import aligned


@dataclass(frozen=True)
class Found:
    """Findings of a check.

    Attributes:
        cells: the cells of each way, in the order of PROMISES; of single process first.
        causes: of what differs, by way.
    """

    cells: Mapping[str, list[Cell]]
    causes: Mapping[str, list[Cause]]
    steps: int
    devices: int


def is_broken(found: Found) -> bool:
    """Return whether a promise does not hold, or nothing could be checked beside one process."""
    trained = [cells for way, cells in found.cells.items() if way != "single" and cells[0].status != "refused"]
    return not trained or any(cell.is_broken for cells in found.cells.values() for cell in cells)


def table(found: Found) -> str:
    """Return a row for each way and a column for each promise: the largest relative difference, or that it differs."""
    rows = [["strategy", *HEADINGS], *([way, *(cell.text for cell in cells)] for way, cells in found.cells.items())]
    return "\n".join(aligned(rows, [0]))


def lines(found: Found) -> Iterator[str]:
    """Yield what differs, and probably why, way by way."""
    for way, cells in found.cells.items():
        if cells[0].status in ("refused", "failed"):
            yield f"{cells[0].status:<10} {way}: {cells[0].told}"
        else:
            for cell in cells:
                if cell.is_broken:
                    yield f"{cell.status:<10} {way}, {cell.promise}: {cell.told}"
        for cause in found.causes.get(way, ()):
            if cause.when:
                yield f"when       {way}: {cause.when}"
            yield f"cause      {way}: {cause.name}. {cause.told}"
            yield f"do         {cause.remedy}"
    if not is_broken(found):
        yield f"holds      {found.steps} steps, {found.devices} devices: no promise is broken"


def as_data(found: Found) -> dict[str, Any]:
    """Return what was found in plain types."""
    return {
        "steps": found.steps,
        "devices": found.devices,
        "holds": not is_broken(found),
        "ways": {way: {cell.promise: cell_data(cell) for cell in cells} for way, cells in found.cells.items()},
        "causes": {way: [asdict(cause) for cause in causes] for way, causes in found.causes.items()},
    }
