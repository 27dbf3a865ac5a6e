"""Records of a sweep's jobs, stored as job.json in their directories, and the table that summarizes them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from lightswitch import regular_files
from lightswitch.config.overrides import key_and_value
from lightswitch.monitoring.display import aligned

_FILE = "job.json"
# A job may be started again with others of these: a higher limit continues it, and the last two do not change the run
_MAY_CHANGE = ("trainer.max_steps", "trainer.max_epochs", "trainer.max_time", "resume", "tags")
_REPEATS = re.compile(r"\+*(seed|(\w+\.)*fold)=")  # keys whose values repeat one experiment
RUNNING, FINISHED, FAILED, STOPPED, NOT_BEGUN = "running", "finished", "failed", "stopped", "not begun"


@dataclass(frozen=True)
class Record:
    """State of one job, as stored in job.json.

    Args:
        number: number of the job in the sweep, from 0.
        overrides: overrides with which its run was started.
        directory: directory of its run.
        state: running, finished, failed, stopped or not begun.
        objective: value of the metric by which jobs are compared; None until it is known.
        error: first line of its failure.
    """

    number: int
    overrides: list[str]
    directory: str
    state: str = RUNNING
    objective: float | None = None
    error: str | None = None

    @property
    def has_failed(self) -> bool:
        """True if the job failed or was killed with the sweep, which leaves its state as running."""
        return self.state in (FAILED, RUNNING)

    @property
    def comparable_objective(self) -> float | None:
        """The objective if it is finite, as Optuna takes no others."""
        return self.objective if self.objective is not None and math.isfinite(self.objective) else None

    def of_another_job(self, overrides: list[str]) -> str | None:
        """Return what this record has other than ``overrides``; None if both belong to the same job."""
        own, others = dict(map(key_and_value, self.overrides)), dict(map(key_and_value, overrides))
        keys = [key for key in {**own, **others} if key not in _MAY_CHANGE and own.get(key) != others.get(key)]
        return ", ".join(f"{key}={own[key]}" if key in own else f"no {key}" for key in keys) or None


def write(record: Record, folder: Path) -> None:
    """Write the record of a job."""
    regular_files.write_json(folder / _FILE, dataclasses.asdict(record))


def read(folder: Path) -> Record | None:
    """Read a job's record; None if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        return regular_files.read_record(folder / _FILE, Record)
    return None


def read_all(sweep: Path) -> list[Record]:
    """Read the records of all jobs in a sweep's folder, sorted by number."""
    found = (read(path.parent) for path in sweep.glob(f"*/{_FILE}"))
    return sorted((record for record in found if record is not None), key=lambda record: record.number)


def table(records: list[Record], objective: str) -> str:
    """Return a table with one row per job and, below it, the first line of each failure."""
    if not records:
        return ""
    header = ("job", "overrides", objective, "state", "directory")
    values = ["-" if record.objective is None else f"{record.objective:.5g}" for record in records]
    rows = [
        (str(record.number), overrides, value, record.state, record.directory)
        for record, overrides, value in zip(records, distinct(records), values, strict=True)
    ]
    failed = [record for record in records if record.has_failed]
    lines = [f"job {record.number:<6} {record.error or 'it was killed'}" for record in failed]
    if failed:
        lines = ["", f"{len(failed)} of {len(records)} jobs failed", *lines]
    finished = [record for record in records if record.state == FINISHED]
    if finished and all(record.objective is None for record in finished):
        advice = "objective=NAME for another metric, or trainer.val_check_interval=N if jobs end before a validation"
        lines += ["", f"no job has logged {objective}; type {advice}"]
    return "\n".join(["", *aligned([header, *rows], range(len(header))), *means(records, objective), *lines, ""])


def means(records: list[Record], objective: str) -> list[str]:
    """Return an empty line, then the mean and sample deviation of each set of jobs that differ only in seed or fold."""
    sets: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for record in records:
        others = tuple(text for text in record.overrides if not _REPEATS.match(text))
        if (value := record.comparable_objective) is not None and len(others) < len(record.overrides):
            sets[others].append(value)
    repeated = {others: values for others, values in sets.items() if len(values) > 1}
    shared = set.intersection(*map(set, repeated)) if len(repeated) > 1 else set(*repeated)
    lines = [
        f"{objective} {mean(values):.5g} ± {stdev(values):.2g} over {len(values)} jobs"
        + "".join(f" {text}" for text in others if text not in shared)
        for others, values in repeated.items()
    ]
    return ["", *lines] if lines else []


def distinct(records: list[Record]) -> list[str]:
    """Return each job's overrides as text, without those that all jobs share."""
    shared = set.intersection(*(set(record.overrides) for record in records)) if len(records) > 1 else set()
    return [" ".join(text.lstrip("+") for text in record.overrides if text not in shared) for record in records]
