"""Check of a module: compares ways to train with one process, in as few runs as possible."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lightswitch.batches.plan import BatchPlan
from lightswitch.checking import causes
from lightswitch.checking.causes import UNKNOWN, Cause, Evidence
from lightswitch.checking.comparison import EPS_32, Comparison, states
from lightswitch.checking.runs import Ended, Measured, Starter, Way, exports
from lightswitch.checking.table import DIAGNOSED, Cell, Found, cells, cells_in_brief
from lightswitch.regular_files import linked

log = logging.getLogger(__name__)

SINGLE = Way("single", ("strategy=single",), 1)
_NUDGE = 8  # units in the last place
_OF_PROBE = "callbacks.check_probe"


class Check:
    """Runs of a module under several ways to train, each started once, when it is first needed.

    Args:
        starter: starts runs of the script.
        folder: folder of the runs.
        words: overrides of every run; they save a checkpoint after half of the steps.
        steps: number of steps that a run trains.
        devices: number of devices in the report.
        global_batch: samples of a step.
        micro_batch: samples that a device processes at once; None for its whole share.
        eps: machine epsilon of the dtype that runs compute in.
        is_exact: equal starts are bitwise equal on these devices.
    """

    def __init__(
        self,
        starter: Starter,
        folder: Path,
        words: Sequence[str],
        steps: int,
        devices: int,
        global_batch: int,
        micro_batch: int | None = None,
        eps: float = EPS_32,
        is_exact: bool = True,
    ) -> None:
        self._starter, self._folder, self._words = starter, folder, words
        self._steps, self._devices = steps, devices
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._eps, self._is_exact = eps, is_exact
        self._ended: dict[tuple[Way, str], Ended] = {}

    def closely(self, ways: Sequence[Way]) -> Found:
        """Measure every promise under every way, and find the cause of each difference."""
        return self._found({way.name: self._closely(way) for way in (SINGLE, *ways)})

    def briefly(self, ways: Sequence[Way]) -> Found:
        """Check each way in two runs: whether it gives the run of one process, and resumes another way's checkpoint.

        A way that does not is measured closely. If it differs for a known cause, the next ways are compared with it as
        well: batch norm, for example, changes the run on two devices, but equally under all ways on two devices.
        """
        alike: list[list[Way]] = [[SINGLE]]  # groups of ways that give the same run
        rows: dict[str, tuple[list[Cell], list[Cause]]] = {"single": ([], [])}
        for way in ways:
            for others in alike:
                row = self._in_brief(way, others)
                if not any(cell.is_broken for cell in row):
                    if self.whole(way).code == 0:
                        others.append(way)
                    rows[way.name] = row, rows[others[0].name][1]
                    break
            else:
                rows[way.name] = self._closely(way)
                if self._causes_in_one:  # one process that does not repeat itself hides all other differences
                    rows["single"] = self._closely(SINGLE)
                    return self._found(rows)
                if self.whole(way).code == 0 and all(one.name != UNKNOWN for one in rows[way.name][1]):
                    alike.append([way])
        rows["single"] = self._resumed_by_one(alike[0][-1])
        return self._found(rows)

    def whole(self, way: Way) -> Ended:
        """Return the run of a way from start to end."""
        return self.start(way, "whole")

    def start(self, way: Way, name: str, resume: Path | None = None, words: Sequence[str] = (), **probe: Any) -> Ended:
        """Return a way's run of a given name; start it if it has not run yet.

        Args:
            name: name of its folder.
            resume: checkpoint to resume from.
            words: further overrides.
            probe: further arguments of the probe.
        """
        if (way, name) not in self._ended:
            folder = self._folder / way.name / name
            of_run: Mapping[str, object] = {
                "mode": "fit",
                "run_id": "check",
                "trainer.num_nodes": 1,
                "trainer.devices": way.ranks,
                "trainer.log_every_n_steps": 1,
                "trainer.num_sanity_val_steps": 0,
                "trainer.limit_test_batches": 0,
                f"{_OF_PROBE}._target_": "lightswitch.checking.probe.Probe",
                f"{_OF_PROBE}.folder": f"'{folder}'",
                f"{_OF_PROBE}.steps": self._steps,
                **{f"{_OF_PROBE}.{key}": value for key, value in probe.items()},
                **({} if resume is None else {"resume": f"'{resume}'"}),
            }
            typed = (f"{key}={value}" for key, value in of_run.items())
            self._ended[way, name] = self._starter.run(folder, [*self._words, *way.words, *typed, *words], way.ranks)
        return self._ended[way, name]

    @cached_property
    def comparison(self) -> Comparison:
        """Comparison with the run of one process."""
        whole = self.whole(SINGLE).moments
        return Comparison(
            states(whole),
            lambda: states(self._killed(SINGLE).moments),
            lambda: states(self.start(SINGLE, "nudged", nudge=_NUDGE * self._eps).moments),
            whole[0]["parameters"],
            self._eps,
            self._is_exact,
        )

    def _found(self, rows: Mapping[str, tuple[list[Cell], list[Cause]]]) -> Found:
        cells_of = {name: row for name, (row, _) in rows.items()}
        return Found(cells_of, {name: found for name, (_, found) in rows.items()}, self._steps, self._devices)

    def _closely(self, way: Way) -> tuple[list[Cell], list[Cause]]:
        measured = self._one if way == SINGLE else self._measured(way)
        row = cells(measured, self.comparison)
        return row, list(self._causes(measured, row))

    def _measured(self, way: Way) -> Measured:
        """Run a way, kill it after half of its steps, resume it, and export its last checkpoint."""
        log.info("checks     %s, %d device%s", way.name, way.ranks, "s" if way.ranks > 1 else "")
        whole = self.whole(way)
        if whole.code or not states(whole.moments):
            return Measured(way, whole)
        killed = self._killed(way)
        checkpoint = killed.run_dir / "checkpoints" / "last.ckpt"
        resumed = elsewhere = None
        if checkpoint.exists():
            checkpoint = linked(checkpoint).resolve()
            if way != SINGLE:
                elsewhere = self.start(SINGLE, f"{way.name}_elsewhere", resume=checkpoint)
            resumed = self.start(way, "resumed", resume=checkpoint)
        exported = self._starter.call(exports, whole.run_dir) or "the process that loads the exported file has ended"
        return Measured(way, whole, killed, resumed, elsewhere, exported)

    def _killed(self, way: Way) -> Ended:
        return self.start(way, "killed", kill_after_step=self._steps // 2 + 1)

    def _causes(self, way: Measured, row: Sequence[Cell]) -> Iterator[Cause]:
        """Yield why a way differs from one process, from runs that record all of their moments."""
        if way.way == SINGLE:
            yield from self._causes_in_one
            return
        if way.whole.code and not way.whole.is_refused:
            yield causes.of_failure(way)
        if not any(cell.status == "differs" and cell.promise in DIAGNOSED for cell in row) or self._causes_in_one:
            return  # if one process does not repeat itself, no other way does
        log.info("diagnosing the difference under %s", way.way.name)
        evidence = Evidence(
            self._by_moments(SINGLE, "moments"), self._cut_as(way.way), self._by_moments(way.way, "moments")
        )
        yield causes.of_difference(evidence, self.comparison, way.states["whole"])

    @cached_property
    def _one(self) -> Measured:
        return self._measured(SINGLE)

    @cached_property
    def _causes_in_one(self) -> list[Cause]:
        return list(causes.of_one(self._one, self.comparison))

    def _cut_as(self, way: Way) -> list[dict[str, Any]]:
        """Return the moments of one process with a way's micro-batches; empty if its micro-batches are the same."""
        micro, own = (BatchPlan.derive(self._global_batch, self._micro_batch, n).micro_batch for n in (way.ranks, 1))
        if micro == own:
            return []
        return self._by_moments(SINGLE, f"moments_{way.name}", f"micro_batch_size={micro}")

    def _by_moments(self, way: Way, name: str, *words: str) -> list[dict[str, Any]]:
        return self.start(way, name, words=words, every_moment=True).moments

    def _in_brief(self, way: Way, others: Sequence[Way]) -> list[Cell]:
        """Compare a way with ways that give the same run, and resume it from a checkpoint of the last of them."""
        base = None if others[0] == SINGLE else states(self.whole(others[0]).moments)
        whole = Measured(way, self.whole(way))
        row = cells_in_brief(whole, self.comparison, base)
        if whole.whole.code or any(cell.is_broken for cell in row):
            return row
        return cells_in_brief(replace(whole, resumed=self._from(others[-1], way)), self.comparison, base)

    def _resumed_by_one(self, saver: Way) -> tuple[list[Cell], list[Cause]]:
        one = Measured(SINGLE, self.whole(SINGLE), resumed=self._from(saver, SINGLE))
        row = cells_in_brief(one, self.comparison, None)
        return self._closely(SINGLE) if any(cell.is_broken for cell in row) else (row, [])

    def _from(self, saver: Way, way: Way) -> Ended | None:
        """Return a way's run from the first checkpoint that another way has saved, if there is one."""
        saved = self.whole(saver).run_dir / "checkpoints"
        found = sorted(saved.glob("step_*.ckpt"), key=lambda path: int(path.stem.removeprefix("step_")))
        return self.start(way, f"from_{saver.name}", resume=found[0]) if found else None
