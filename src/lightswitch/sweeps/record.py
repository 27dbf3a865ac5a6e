"""Records of a sweep's jobs, stored as job.json in their directories, and the table that summarizes them."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lightswitch import regular_files
from lightswitch.config.overrides import key_and_value
from lightswitch.errors import IrregularFile, listed
from lightswitch.monitoring.display import aligned
from lightswitch.monitoring.objective import find, of_module
from lightswitch.runs import saved

_FILE = "job.json"
# A job may be started again with others of these: a higher limit continues it, and the last two do not change the run
_MAY_CHANGE = ("trainer.max_steps", "trainer.max_epochs", "trainer.max_time", "resume", "tags")
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
        start: identifies the start of the job; all tasks of one start write the same record.
    """

    number: int
    overrides: list[str]
    directory: str
    state: str = RUNNING
    objective: float | None = None
    error: str | None = None
    start: str = ""

    @property
    def has_failed(self) -> bool:
        """True if the job failed or was killed with the sweep, which leaves its state as running."""
        return self.state in (FAILED, RUNNING)

    @property
    def is_comparable(self) -> bool:
        """True if the job has a finite objective, the only kind that Optuna takes."""
        return self.objective is not None and math.isfinite(self.objective)

    def of_another_job(self, overrides: list[str]) -> str | None:
        """Return what this record has other than ``overrides``; None if both belong to the same job."""
        own, others = dict(map(key_and_value, self.overrides)), dict(map(key_and_value, overrides))
        keys = [key for key in {**own, **others} if key not in _MAY_CHANGE and own.get(key) != others.get(key)]
        return ", ".join(f"{key}={own[key]}" if key in own else f"no {key}" for key in keys) or None


def write(record: Record, folder: Path) -> None:
    """Write the record, unless another task of the same start has recorded a failure."""
    there = read(folder)
    if there is not None and record.start and (there.start, there.state) == (record.start, FAILED):
        return
    beside = folder / f"{_FILE}.{secrets.token_hex(4)}"
    beside.write_text(json.dumps(dataclasses.asdict(record), indent=2) + "\n")
    os.replace(beside, folder / _FILE)


def read(folder: Path) -> Record | None:
    """Read a job's record, or rebuild it from the run's overrides if it is damaged; None if there is no record."""
    try:
        return regular_files.read_record(folder / _FILE, Record)
    except FileNotFoundError:
        return None
    except (ValueError, IrregularFile):  # empty, truncated, or not text
        return _of_its_run(folder)


def is_damaged(folder: Path) -> bool:
    """Return whether a record exists but can't be read."""
    try:
        regular_files.read_record(folder / _FILE, Record)
    except (ValueError, IrregularFile):
        return True
    except FileNotFoundError:
        pass
    return False


def _of_its_run(folder: Path) -> Record | None:
    """Rebuild a record from the overrides that the job's run saved, so that no other job reuses its checkpoints."""
    overrides = saved.read_yaml(folder / ".hydra/overrides.yaml")
    if not isinstance(overrides, list):
        return None
    return Record(
        int(folder.name) if folder.name.isdecimal() else 0, list(map(str, overrides)), os.path.relpath(folder)
    )


def read_all(sweep: Path) -> list[Record]:
    """Read the records of all jobs in a sweep's folder, sorted by number."""
    found = (read(path.parent) for path in sweep.glob(f"*/{_FILE}"))
    return sorted((record for record in found if record is not None), key=lambda record: record.number)


def table(records: list[Record], objective: str, logged: Iterable[str] = ()) -> str:
    """Return a table with one row per job and, below it, the first line of each failure.

    Args:
        logged: names of the metrics that jobs logged, to list them if no job has logged the objective.
    """
    if not records:
        return ""
    header = ("job", "overrides", objective, "state", "directory")
    rows = [
        (str(record.number), overrides, _number(record.objective), record.state, record.directory)
        for record, overrides in zip(records, _distinct(records), strict=True)
    ]
    failed = [record for record in records if record.has_failed]
    lines = [f"job {record.number:<6} {record.error or 'it was killed'}" for record in failed]
    if failed:
        lines = ["", f"{len(failed)} of {len(records)} jobs failed", *lines]
    finished = [record for record in records if record.state == FINISHED]
    if finished and all(record.objective is None for record in finished):
        lines += ["", _absent(objective, of_module(logged))]
    return "\n".join(["", *aligned([header, *rows], range(len(header))), *lines, ""])


def _absent(objective: str, logged: list[str]) -> str:
    there = f", only {listed(logged, 'metrics', shown=8)}" if logged else ""
    return (
        f"no job has logged {objective}{there}; type objective={find(logged, None) or 'NAME'} for another metric, or "
        "trainer.val_check_interval=N if jobs end before a validation"
    )


def _distinct(records: list[Record]) -> list[str]:
    """Return each job's overrides as text, without those that all jobs share."""
    shared = set.intersection(*(set(record.overrides) for record in records)) if len(records) > 1 else set()
    return [" ".join(text.lstrip("+") for text in record.overrides if text not in shared) for record in records]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"
