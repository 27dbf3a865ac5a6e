"""The table that a sweep ends with."""

from __future__ import annotations

from lightswitch.sweeps.record import FINISHED, Record


def of(records: list[Record], objective: str) -> str:
    """Return a row for each job, and below them the first line of each failure."""
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
    elif all(record.state == FINISHED and record.objective is None for record in records):
        other = "type objective=NAME for another metric, or trainer.val_check_interval=N where jobs end unvalidated"
        told = ["", f"no job has logged {objective}; {other}"]
    return "\n".join(["", *_aligned([header, *rows]), *told, ""])


def _distinct(records: list[Record]) -> list[str]:
    """Return each job's overrides, without those that all jobs share."""
    shared = set.intersection(*(set(record.overrides) for record in records)) if len(records) > 1 else set()
    return [" ".join(text.lstrip("+") for text in record.overrides if text not in shared) for record in records]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
