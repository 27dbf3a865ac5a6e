"""The table that a sweep ends with."""

from __future__ import annotations

from collections.abc import Iterable

from lightswitch.errors import listed
from lightswitch.monitoring.objective import find, of_module
from lightswitch.monitoring.summary import aligned
from lightswitch.sweeps.record import FINISHED, Record


def of(records: list[Record], objective: str, logged: Iterable[str] = ()) -> str:
    """Return a row for each job, and below them the first line of each failure.

    Args:
        logged: the metrics that jobs ended with, for the case that the objective is none of them.
    """
    if not records:
        return ""
    header = ("job", "overrides", objective, "state", "directory")
    rows = [
        (str(record.number), overrides, _number(record.objective), record.state, record.directory)
        for record, overrides in zip(records, _distinct(records), strict=True)
    ]
    failed = [record for record in records if record.has_failed]
    told = [f"job {record.number:<6} {record.error or 'it was killed'}" for record in failed]
    if failed:
        told = ["", f"{len(failed)} of {len(records)} jobs failed", *told]
    finished = [record for record in records if record.state == FINISHED]
    if finished and all(record.objective is None for record in finished):
        told += ["", _absent(objective, of_module(logged))]
    return "\n".join(["", *aligned([header, *rows], range(len(header))), *told, ""])


def _absent(objective: str, logged: list[str]) -> str:
    there = f", only {listed(logged, 'metrics', shown=8)}" if logged else ""
    return (
        f"no job has logged {objective}{there}; type objective={find(logged, None) or 'NAME'} for another metric, or "
        "trainer.val_check_interval=N where jobs end unvalidated"
    )


def _distinct(records: list[Record]) -> list[str]:
    """Return each job's overrides, without those that all jobs share."""
    shared = set.intersection(*(set(record.overrides) for record in records)) if len(records) > 1 else set()
    return [" ".join(text.lstrip("+") for text in record.overrides if text not in shared) for record in records]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"
