"""What is known of each job of a sweep: a small file in its directory, which outlives every process."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from lightswitch.runs import saved

_FILE = "job.json"
_LIMITS = ("trainer.max_steps", "trainer.max_epochs", "trainer.max_time")  # a job goes on with a higher one
RUNNING, FINISHED, FAILED, STOPPED = "running", "finished", "failed", "stopped"


@dataclass(frozen=True)
class Record:
    number: int
    overrides: list[str]
    directory: str
    state: str = RUNNING
    objective: float | None = None
    error: str | None = None  # the first line of it
    start: str = ""  # which start of the cluster's job, where several tasks write of the same one

    @property
    def has_failed(self) -> bool:
        """A job that was killed with its parent has said nothing."""
        return self.state in (FAILED, RUNNING)

    def of_another_job(self, overrides: list[str]) -> str | None:
        """The values that make it so: they differ from those in ``overrides``."""
        own, others = _values(self.overrides), _values(overrides)
        keys = [key for key in own if key in others and key not in _LIMITS and own[key] != others[key]]
        return " ".join(f"{key}={own[key]}" for key in keys) or None


def _values(overrides: list[str]) -> dict[str, str]:
    split = (override.lstrip("+").partition("=") for override in overrides)
    return {key: value for key, _, value in split}


def write(record: Record, folder: Path) -> None:
    """Of the tasks of one start, the first that fails is believed."""
    there = read(folder)
    if there is not None and record.start and (there.start, there.state) == (record.start, FAILED):
        return
    beside = folder / f"{_FILE}.{secrets.token_hex(4)}"
    beside.write_text(json.dumps(dataclasses.asdict(record), indent=2) + "\n")
    os.replace(beside, folder / _FILE)


def read(folder: Path) -> Record | None:
    try:
        return Record(**json.loads((folder / _FILE).read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):  # it is empty, or cut short, or no text
        return _of_its_run(folder)


def is_damaged(folder: Path) -> bool:
    """Whether there is a record that can't be read."""
    try:
        Record(**json.loads((folder / _FILE).read_text()))
    except (ValueError, TypeError):
        return True
    except FileNotFoundError:
        pass
    return False


def _of_its_run(folder: Path) -> Record | None:
    """What the job's own run has written: its checkpoints must not become another job's."""
    overrides = saved.yaml(folder / ".hydra/overrides.yaml")
    if not isinstance(overrides, list):
        return None
    return Record(
        int(folder.name) if folder.name.isdecimal() else 0, list(map(str, overrides)), os.path.relpath(folder)
    )


def read_all(sweep: Path) -> list[Record]:
    found = (read(path.parent) for path in sweep.glob(f"*/{_FILE}"))
    return sorted((record for record in found if record is not None), key=lambda record: record.number)
