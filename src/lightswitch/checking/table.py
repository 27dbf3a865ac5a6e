"""Table and messages of a check: each promise under each way to train, with the measured difference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightswitch.checking.causes import Cause
from lightswitch.checking.comparison import Compared, Comparison, States, unequal
from lightswitch.checking.runs import EQUAL, Ended, Measured
from lightswitch.errors import listed
from lightswitch.monitoring.display import aligned

_OF_A_STEP = (
    "what is logged by step is the mean over devices and micro batches; a metric that is no mean over samples is exact "
    "by epoch: self.log(…, metric, on_step=False, on_epoch=True) with a torchmetrics.Metric"
)
SAME_RUN = ("train/loss", "logged", "parameters", "buffers", "optimizer state")
RANKS, EQUAL_STARTS, RESUMED, ELSEWHERE, EXPORTED = (
    "equal on all ranks",
    "two equal starts",
    "killed, resumed",
    "resumed in one process",
    "exported, loaded",
)
HEADINGS = (  # of the table's columns
    *("train/loss", "logged", "parameters", "buffers", "optimizer", "all ranks"),
    *("two starts", "resumed", "in one", "exported"),
)
DIAGNOSED = (
    *(name for name in SAME_RUN if name != "logged"),
    RANKS,
)  # promises whose cause is searched for in the moments of a step
PROMISES = (*SAME_RUN, RANKS, EQUAL_STARTS, RESUMED, ELSEWHERE, EXPORTED)


@dataclass(frozen=True)
class Found:
    """Findings of a check.

    Attributes:
        cells: cells of each way, in the order of PROMISES; the single process comes first.
        causes: causes of differences, by way.
    """

    cells: Mapping[str, list[Cell]]
    causes: Mapping[str, list[Cause]]
    steps: int
    devices: int


def is_broken(found: Found) -> bool:
    """Return whether a promise does not hold, or only one process could be checked."""
    trained = [cells for way, cells in found.cells.items() if way != "single" and cells[0].status != "refused"]
    return not trained or any(cell.is_broken for cells in found.cells.values() for cell in cells)


def as_text(found: Found) -> str:
    """Return a row for each way and a column for each promise: the largest relative difference, or a status."""
    rows = [["strategy", *HEADINGS], *([way, *(cell.text for cell in cells)] for way, cells in found.cells.items())]
    return "\n".join(aligned(rows, [0]))


def lines(found: Found) -> Iterator[str]:
    """Yield the differences and their probable causes, way by way."""
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


def check_as_data(found: Found) -> dict[str, Any]:
    """Return the findings in plain types."""
    return {
        "steps": found.steps,
        "devices": found.devices,
        "holds": not is_broken(found),
        "ways": {way: {cell.promise: as_data(cell) for cell in cells} for way, cells in found.cells.items()},
        "causes": {way: [asdict(cause) for cause in causes] for way, causes in found.causes.items()},
    }


@dataclass(frozen=True)
class Cell:
    """Result for a promise under a way to train.

    Attributes:
        status: holds, differs, failed, refused, or none if it does not apply.
        told: the largest relative difference, the first difference, or an error message.
        compared: the comparison, if there was one.
    """

    promise: str
    status: str
    told: str = ""
    compared: Compared | None = None

    @property
    def is_broken(self) -> bool:
        return self.status in ("differs", "failed")

    @property
    def text(self) -> str:
        """Short text for a table."""
        if self.compared is not None and self.compared.first is None:
            return digits(self.compared.largest)
        if self.compared is not None and self.compared.first is not None:
            return f"DIFFERS {digits(self.compared.first.relative)}"
        return {"holds": "yes", "none": "-"}.get(self.status, self.status.upper())


def cells(way: Measured, comparison: Comparison) -> list[Cell]:
    """Return the cells of a way, in the order of PROMISES; for one process, only starts and exports are compared."""
    if way.whole.code:
        return _untrained(way)
    return [*_same_run(way, comparison), *_of_starts(way, comparison), _exported(way)]


def cells_in_brief(way: Measured, comparison: Comparison, base: States | None) -> list[Cell]:
    """Return the cells of a way that was not killed, in the order of PROMISES.

    They describe its whole run and, if there was one, its resume from another way's checkpoint.

    Args:
        base: states of the way to compare both with; None for one process.
    """
    if way.whole.code:
        return _untrained(way)
    resumed = Cell(RESUMED, "none")
    if way.resumed is not None:
        found = way.states["resumed"]
        resumed = _gone_on(RESUMED, way.resumed, comparison.loss(found, base), comparison.all_tensors(found, base))
    others = (Cell(name, "none") for name in (ELSEWHERE, EXPORTED))
    return [*_same_run(way, comparison, base), Cell(EQUAL_STARTS, "none"), resumed, *others]


def _untrained(way: Measured) -> list[Cell]:
    has_trained = max(way.states["whole"], default=0) > 0
    status = "refused" if way.whole.is_refused and not has_trained else "failed"
    return [Cell(name, status, way.whole.problem) for name in PROMISES]


def _same_run(way: Measured, comparison: Comparison, base: States | None = None) -> Iterator[Cell]:
    if way.way.ranks == 1:
        yield from (Cell(name, "none") for name in (*SAME_RUN, RANKS))
        return
    whole = way.states["whole"]
    found = (
        comparison.loss(whole, base),
        comparison.logged(whole, base),
        comparison.parameters(whole, base),
        comparison.buffers(whole, base),
        comparison.optimizers(whole, base),
    )
    cells = {name: _cell(name, compared) for name, compared in zip(SAME_RUN, found, strict=True)}
    if [name for name, cell in cells.items() if cell.status == "differs"] == ["logged"]:
        cells["logged"] = replace(cells["logged"], told=f"{cells['logged'].told}; {_OF_A_STEP}")
    yield from cells.values()
    ranks = next(unequal(whole, {f"model.{name}" for name in comparison.names}), None)
    if ranks is None:
        yield Cell(RANKS, "holds")
    else:
        step, name, others = ranks
        numbers = listed([str(number) for number in others])
        yield Cell(RANKS, "differs", f"{name} on rank {numbers} differs from rank 0 after step {step}")


def _of_starts(way: Measured, comparison: Comparison) -> Iterator[Cell]:
    whole, killed = way.states["whole"], way.states.get("killed", {})
    yield _gone_on(EQUAL_STARTS, way.killed, *comparison.again(killed, whole))
    for name, run in ((RESUMED, way.resumed), (ELSEWHERE, way.elsewhere)):
        if name == ELSEWHERE and way.way.ranks == 1:
            yield Cell(name, "none")
        elif run is None:
            yield Cell(name, "failed", "the killed run saved no checkpoint")
        elif name == RESUMED:
            yield _gone_on(name, run, *comparison.again(way.states["resumed"], whole))
        else:
            found = way.states["elsewhere"]
            yield _gone_on(name, run, comparison.loss(found), comparison.all_tensors(found))


def _gone_on(name: str, run: Ended | None, loss: Compared, tensors: Compared) -> Cell:
    """Return the cell of a killed or resumed run: whether it equals another run, over the steps of both."""
    if run is not None and run.code and (run.code > 0 or name != EQUAL_STARTS):  # that run kills itself
        return Cell(name, "failed", run.problem)
    if run is None or not tensors.count:
        return Cell(name, "failed", "it trained no step" if run is None else run.problem)
    return _cell(name, _first_of(loss, tensors))


def _first_of(one: Compared, other: Compared) -> Compared:
    """Return the comparison that differs first; if neither differs, the one with the larger difference."""
    if one.first is None and other.first is None:
        return max(one, other, key=lambda compared: compared.largest)
    found = [compared for compared in (other, one) if compared.first is not None]
    return min(found, key=lambda compared: compared.first.step if compared.first else 0)


def _cell(name: str, compared: Compared) -> Cell:
    if not compared.count:
        return Cell(name, "none")
    first = compared.first
    if first is None:
        return Cell(name, "holds", digits(compared.largest), compared)
    others = len(compared.differing) - 1
    more = f" and {others} other{'s' if others > 1 else ''}" if others else ""
    return Cell(name, "differs", f"{first.name}{more} after step {first.step}: {digits(first.relative)}", compared)


def _exported(way: Measured) -> Cell:
    return Cell(EXPORTED, "holds") if way.exported == EQUAL else Cell(EXPORTED, "failed", way.exported)


def digits(value: float) -> str:
    """Return a relative difference with one significant digit."""
    return "0" if value == 0 else "inf" if math.isinf(value) else f"{value:.0e}".replace("e-0", "e-")


def as_data(cell: Cell) -> dict[str, Any]:
    """Return a cell in plain types."""
    data: dict[str, Any] = {"status": cell.status, "told": cell.told}
    if cell.compared is not None:
        data["largest"] = cell.compared.largest if math.isfinite(cell.compared.largest) else None
        data["differing"] = list(cell.compared.differing)
    return data
