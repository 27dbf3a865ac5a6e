"""Check of a module: a table of the promises under each way to train, and what differs first, at which moment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lightswitch.checking.comparison import EPS_32, Compared, Comparison
from lightswitch.checking.probe import FORWARD
from lightswitch.checking.runs import ShortRun, export_problem
from lightswitch.errors import listed
from lightswitch.monitoring.display import aligned
from lightswitch.regular_files import linked

log = logging.getLogger(__name__)

KINDS = ("logged", "parameters", "buffers", "optimizer")
STARTS, RESUMED, IN_ONE, EXPORTED = "two starts", "resumed", "in one", "exported"
PROMISES = (*KINDS, STARTS, RESUMED, IN_ONE, EXPORTED)  # the columns of the table
REMEDIES = {
    "batch norm": "type trainer.sync_batchnorm=true on GPUs, use a norm over a sample's own features (GroupNorm, "
    "LayerNorm), or give the same micro_batch_size everywhere",
    "noise by rank": "draw it in the dataset, where each sample has its own seed, or set dropout and other noise to 0 "
    "and check again: several devices draw different numbers than one process, which affects only this comparison",
    "loss over the local batch": 'return {"loss": loss, "items": n} where the loss is a mean over n items, such as '
    "tokens; gather what it compares from all devices (self.all_gather, sync_grads=True); or give the same "
    "micro_batch_size everywhere",
}
_NUDGE = 8  # units in the last place


@dataclass(frozen=True)
class Way:
    """Way to train: a strategy on a number of devices.

    Attributes:
        words: overrides that select it.
    """

    name: str
    words: tuple[str, ...]
    ranks: int


SINGLE = Way("single", ("strategy=single",), 1)


@dataclass(frozen=True)
class Cell:
    """Result for a promise under a way to train.

    Attributes:
        status: holds, differs, failed, refused, or none if it does not apply.
        reason: the first difference, or an error message.
        largest: largest relative difference; None if nothing was compared.
    """

    status: str
    reason: str = ""
    largest: float | None = None

    @property
    def is_broken(self) -> bool:
        """True if the promise does not hold."""
        return self.status in ("differs", "failed")

    @property
    def text(self) -> str:
        """Short text for a table."""
        number = "" if self.largest is None else f"{self.largest:.0e}".replace("e-0", "e-").replace("0e+00", "0")
        words = {"holds": number or "yes", "none": "-"}
        return words.get(self.status, f"{self.status.upper()} {number}".rstrip())


@dataclass(frozen=True)
class Row:
    """Findings for a way to train.

    Attributes:
        cells: by promise.
        first: what differs first from one process, and when; empty if nothing does.
        causes: what the comparison itself shows of the cause, by its name in `REMEDIES`.
    """

    cells: Mapping[str, Cell]
    first: str = ""
    causes: Mapping[str, str] = field(default_factory=dict)

    def lines(self, way: str) -> Iterator[str]:
        """Yield what is broken, what differs first, and what is shown of the cause."""
        reported = {cell: promise for promise, cell in self.cells.items() if cell.is_broken or cell.status == "refused"}
        for cell, promise in reported.items():
            of = f"{way}, {promise}" if len(set(self.cells.values())) > 1 else way  # a run that ended has one cell
            yield f"{cell.status:<10} {of}: {cell.reason}"
        if self.first:
            yield f"first      {way}: {self.first}"
        for name, shown in self.causes.items():
            yield f"cause      {way}: {name}. {shown}"
            yield f"do         {REMEDIES[name]}"


def holds(rows: Mapping[str, Row]) -> bool:
    """Return whether no promise is broken, and a way beside the single process could be checked."""
    cells = [cell for row in rows.values() for cell in row.cells.values()]
    is_tried = any(row.cells["parameters"].status == "holds" for row in rows.values())
    return is_tried and not any(cell.is_broken for cell in cells)


def table(rows: Mapping[str, Row]) -> str:
    """Return a row for each way and a column for each promise: the largest relative difference, or a status."""
    texts = [[way, *(row.cells[promise].text for promise in PROMISES)] for way, row in rows.items()]
    return "\n".join(aligned([("strategy", *PROMISES), *texts], [0]))


def as_data(rows: Mapping[str, Row]) -> dict[str, Any]:
    """Return the findings in plain types."""
    return {"holds": holds(rows), "ways": {way: asdict(row) for way, row in rows.items()}}


@dataclass
class Check:
    """Runs of a module under several ways to train, each started once, when it is first needed.

    Args:
        start: starts a run in a folder with overrides, and returns it when it has ended.
        folder: folder of the runs.
        words: overrides of every run; they save a checkpoint after half of the steps.
        steps: number of steps that a run trains.
        micro_batches: returns the micro-batch size of so many devices.
        eps: machine epsilon of the dtype that runs compute in.
        is_exact: equal starts are bitwise equal on these devices.
    """

    start: Callable[[Path, Sequence[str]], ShortRun]
    folder: Path
    words: Sequence[str]
    steps: int
    micro_batches: Callable[[int], int]
    eps: float = EPS_32
    is_exact: bool = True
    _runs: dict[tuple[Way, str], ShortRun] = field(default_factory=dict)

    def run(self, way: Way, name: str = "whole", *words: str, **probe: object) -> ShortRun:
        """Return a way's run of a given name, such as the one from start to end; start it if it has not run yet.

        Args:
            probe: further arguments of the probe.
        """
        if (way, name) not in self._runs:
            folder = self.folder / way.name / name
            probe |= {"_target_": "lightswitch.checking.probe.Probe", "folder": f"'{folder}'", "steps": self.steps}
            settings: dict[str, object] = {"mode": "fit", "run_id": "check", "hydra.run.dir": f"'{folder / 'run'}'"}
            settings |= {"trainer.num_nodes": 1, "trainer.devices": way.ranks, "trainer.log_every_n_steps": 1}
            settings |= {"trainer.num_sanity_val_steps": 0, "trainer.limit_test_batches": 0}
            settings |= {f"callbacks.check_probe.{key}": value for key, value in probe.items()}
            typed = [f"{key}={value}" for key, value in settings.items()]
            self._runs[way, name] = self.start(folder, [*self.words, *way.words, *typed, *words])
        return self._runs[way, name]

    def row(self, way: Way) -> Row:
        """Measure every promise under a way."""
        log.info("checks     %s, %d device%s", way.name, way.ranks, "s" if way.ranks > 1 else "")
        whole = self.run(way)
        if whole.code:
            return Row(dict.fromkeys(PROMISES, Cell("refused" if whole.is_refused else "failed", whole.problem)))
        cells = dict.fromkeys(KINDS, Cell("none"))
        if way != SINGLE:
            cells = {kind: _cell(self._comparison.of_kind(kind, whole.states)) for kind in KINDS}
        cells |= self._starts(way)
        problem = export_problem(whole.run_dir)
        cells[EXPORTED] = Cell("failed", problem) if problem else Cell("holds")
        is_different = any(cells[kind].status == "differs" for kind in KINDS)
        # if one process does not repeat itself, no other way does
        return Row(cells, *self._first(way)) if is_different and self._comparison.is_repeated else Row(cells)

    @cached_property
    def _comparison(self) -> Comparison:
        whole = self.run(SINGLE)
        return Comparison(
            whole.states,
            self._killed(SINGLE).states,
            lambda: self.run(SINGLE, "nudged", nudge=_NUDGE * self.eps).states,
            whole.moments[0]["parameters"],
            self.eps,
            self.is_exact,
        )

    def _killed(self, way: Way) -> ShortRun:
        return self.run(way, "killed", kill_after_step=self.steps // 2 + 1)

    def _starts(self, way: Way) -> dict[str, Cell]:
        """Return the cells of a run that kills itself, and of those that go on from its checkpoint."""
        whole, killed = self.run(way).states, self._killed(way)
        again = self._comparison.again(killed.states, whole)
        starts = _cell(again) if killed.code <= 0 and again.count else Cell("failed", killed.problem)
        checkpoint = killed.run_dir / "checkpoints" / "last.ckpt"
        cells = {STARTS: starts, RESUMED: Cell("failed", "the killed run saved no checkpoint"), IN_ONE: Cell("none")}
        if not checkpoint.exists():
            return cells
        resume = f"resume='{linked(checkpoint).resolve()}'"
        run = self.run(way, "resumed", resume)
        cells[RESUMED] = Cell("failed", run.problem) if run.code else _cell(self._comparison.again(run.states, whole))
        if way != SINGLE:
            run = self.run(SINGLE, f"from_{way.name}", resume)
            compared = self._comparison.of_kind("tensors", run.states)
            cells[IN_ONE] = Cell("failed", run.problem) if run.code else _cell(compared)
        return cells

    def _first(self, way: Way) -> tuple[str, dict[str, str]]:
        """Return what differs first under a way, when, and what the comparison shows of the cause."""
        whole, one = self.run(way).states, self.run(SINGLE)
        logged = self._comparison.of_kind("logged", whole).differing
        metrics = [replace(different, moment=(different.moment[0], FORWARD)) for different in logged]
        tensors = self._comparison.of_kind("tensors", whole).differing
        moment = min(different.moment for different in [*metrics, *tensors])
        first = [different for different in [*metrics, *tensors] if different.moment == moment]
        named, causes = [different.name for different in first], dict[str, str]()
        if first[0] in metrics and moment in one.states and one.states[moment].draws:
            causes["noise by rank"] = f"the training step draws random numbers, and its {named[0]} differs"
        if norms := [norm for norm in one.moments[0]["batch_norms"] if f"{norm}.running_mean" in named]:
            causes["batch norm"] = f"{listed(norms)} computes its statistics over a micro batch"
        if tensors and not causes and self._is_of_micro_batches(way):
            causes["loss over the local batch"] = "one process with the micro batches of a device gives the same run"
        return f"{listed(named)} differs first, {first[0].when}", causes

    def _is_of_micro_batches(self, way: Way) -> bool:
        """Return whether one process with a way's micro-batches gives the way's run."""
        micro_batch = self.micro_batches(way.ranks)
        if micro_batch == self.micro_batches(1):
            return False
        cut = self.run(SINGLE, f"cut_{way.name}", f"micro_batch_size={micro_batch}")
        compared = self._comparison.of_kind("parameters", self.run(way).states, cut.states)
        return bool(compared.count) and not compared.differing


def _cell(compared: Compared) -> Cell:
    if not compared.count:
        return Cell("none")
    if not compared.differing:
        return Cell("holds", largest=compared.largest)
    first, *others = compared.differing
    more = f" and {len(others)} other{'s' if len(others) > 1 else ''}" if others else ""
    return Cell("differs", f"{first.name}{more} {first.when}: {first.relative:.0e}", first.relative)
