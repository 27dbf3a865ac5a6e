"""The page of a run's directory: its files, the columns of metrics.csv, and the fields of what is JSON."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import yaml

from lightswitch.monitoring.metrics import FIRST_COLUMNS
from lightswitch.monitoring.step_times import StepTimes
from lightswitch.runs.claim import Holder
from lightswitch.runs.record import Origin
from lightswitch.runs.resume import End, Start
from lightswitch.sweeps.record import Record
from tests.engine.tables.documents import code, page, table

_TOLD = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
FILES, FILES_OF_SOME, COLUMNS = (_TOLD[kind] for kind in ("files", "files_of_some", "columns"))
RECORDS = (
    *(("run.json", Origin), ("starts of run.json", Start), ("ended of run.json", End)),
    *(("step_times.json", StepTimes), ("job.json", Record)),
)


def text() -> str:
    """Return the page.

    Raises:
        KeyError: a class of a record has a field without a line in its docstring, or metrics.csv a column.
    """
    files = table(("file", "what it is"), ((code(name), told) for name, told in FILES.items()))
    some = table(("file", "when, and what it is"), ((code(name), told) for name, told in FILES_OF_SOME.items()))
    assert COLUMNS.keys() >= {*FIRST_COLUMNS}
    columns = table(("column", "what it is"), ((code(name), told) for name, told in COLUMNS.items()))
    intro = "A run's files are in `runs/<name>/<run_id>/`. An evaluation has its own, or adds to those of a run."
    return page(
        "The run directory",
        intro,
        files,
        f"Some runs have more:\n\n{some}",
        "## metrics.csv",
        "A row for each step at which something was logged. It is complete on disk after each row, and a run that goes "
        "on first drops the rows that it will write again.",
        columns,
        "## results.json",
        "The last value of each metric, by its name in metrics.csv. A run that was stopped has those so far; "
        "one whose world has changed, also `world_changes` and `steps_trained_twice`.",
        *(_section(name, record) for name, record in RECORDS),
        _section(".lock", Holder),
    )


def _section(file: str, record: type) -> str:
    described, _, arguments = (record.__doc__ or "").partition("Args:")
    told = {name: " ".join(text.split()) for name, text in re.findall(_ARGUMENT, arguments, re.MULTILINE)}
    rows = ((code(f.name), code(str(f.type)), told[f.name]) for f in dataclasses.fields(record))
    return f"## {file}\n\n{' '.join(described.split())}\n\n{table(('field', 'type', 'what it is'), rows)}"


_ARGUMENT = r"^        (\w+): (.*(?:\n            .*)*)"
