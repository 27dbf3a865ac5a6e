"""The engine's loggers: metrics.csv, a table of all metrics with a row per step, and one for Weights & Biases.

A run that goes back to an earlier step is one curve in each: rows of metrics.csv are dropped, TensorBoard gets a mark,
and Weights & Biases, which can't remove what it has received, gets another run with the rows before.
"""

from __future__ import annotations

import csv
import io
import itertools
import logging
import os
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lightswitch import regular_files
from lightswitch.errors import NoExperiment, Refused, shown

log = logging.getLogger(__name__)


WORLD = "world"  # the number of devices, logged at the first step after a change
FIRST_COLUMNS = ("step", "samples", "epoch")
_OF_WANDB = re.compile(r"(?:offline-)?run-(\d+_\d+)-(.+)")  # the folder of a W&B run: its start and its id


class MetricsFile(Logger):
    """Logger that writes `metrics.csv` in `directory`, which is complete on disk after each call.

    Columns: `step` (Lightning's index of the last optimizer step, from 0), `samples` (consumed so far), `epoch`, then
    the metrics in order of first appearance. All calls for one step share a row, and the steps of the rows increase. A
    row without a value of `samples`, such as that of a test, takes the value of the previous row when it is appended;
    it has none if it is put before others.

    If the file exists, training first drops the rows that it will write again: those after its first logged step. It
    updates that step's row instead of dropping it, since the row may hold the metrics of a validation. Evaluation alone
    drops nothing.

    Args:
        directory: directory of the file.
    """

    def __init__(self, directory: str | Path) -> None:
        super().__init__()
        self._directory = Path(directory)
        self._table: Table | None = None
        self._trains = False

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if self._table is None:
            self._table = Table(self._directory / "metrics.csv")
        step = self._table.last_step if step is None else step
        if not self._trains and _is_training(metrics):
            self._trains = True
            self._table.drop_after(step)
        self._table.put(step, {name: _text(value) for name, value in metrics.items()})

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: a table of metrics has no place for hyperparameters, and the run directory has the config."""

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def experiment(self) -> Any:
        """An object without attributes, which code that checks `hasattr(logger.experiment, …)` skips."""
        return _Nothing()

    @property
    def save_dir(self) -> str:
        return str(self._directory)

    @property
    def log_dir(self) -> str:
        return str(self._directory)


class _Nothing:
    """Stand-in for the experiment of a table of metrics."""

    def __getattr__(self, name: str) -> NoReturn:
        """Raise NoExperiment: a table of metrics can't hold images."""
        raise NoExperiment(
            "self.logger.experiment needs a logger that accepts images, but the only logger is metrics.csv, which "
            "stores only numbers; type logger=default, whose first logger is TensorBoard"
        )


class Table:
    """CSV file keyed by the column `step`: the last row is updated in place, any other change writes a new file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: list[str] = []
        self._last: dict[str, str] = {}
        self._last_start = self._end = self._size = 0  # offsets in the file, in bytes
        try:
            self._load()
        except (ValueError, KeyError, csv.Error):
            aside = (path.with_name(f"{path.stem}_damaged_{number}{path.suffix}") for number in itertools.count(1))
            kept = next(other for other in aside if not other.exists())
            path.rename(kept)
            log.warning("%s has lines that can't be read; renamed it to %s, and began a new file", path, kept.name)
            self._load()

    @property
    def last_step(self) -> int:
        """Step of the last row, the largest; 0 in an empty table."""
        return int(self._last.get("step", 0))

    def put(self, step: int, values: Mapping[str, str]) -> None:
        """Merge values, as text by column, into the row of a step, or add the row where its step belongs."""
        if _size(self._path) != self._size:
            if not self._path.exists():
                raise Refused(f"{shown(self._path)} was removed while the run wrote to it; start the run again")
            self._load()  # another process has written since
        if step < self.last_step:
            self._put_earlier(step, values)
            return
        if self._last.get("step") != str(step):
            self._last = {"step": str(step), "samples": self._last.get("samples", "")}
            self._last_start = self._end
        self._last.update(values)
        if self._last.keys() <= set(self._columns):
            self._write_last()
        else:
            rows = self._rows()
            self._replace([*(rows if self._last_start == self._end else rows[:-1]), self._last])

    def drop_after(self, step: int) -> None:
        """Drop the rows of later steps."""
        rows = self._rows()
        kept = [row for row in rows if int(row["step"]) <= step]
        if len(kept) < len(rows):
            self._replace(kept)

    def _put_earlier(self, step: int, values: Mapping[str, str]) -> None:
        """Merge values into a row before the last one, as for the evaluation of an older checkpoint, or insert it."""
        rows = self._rows()
        place = next(index for index, row in enumerate(rows) if int(row["step"]) >= step)
        if rows[place]["step"] == str(step):
            # the row has its epoch and samples already: an evaluation reports those at the time that it runs
            values = {name: text for name, text in values.items() if name not in FIRST_COLUMNS}
        else:
            rows.insert(place, {"step": str(step)})
        rows[place].update(values)
        self._replace(rows)

    def _write_last(self) -> None:
        # A merged row is nearly always longer than the row it replaces. Then a single call writes it, and if the
        # process is killed meanwhile, the file has the old line or the new one.
        line = _csv(self._columns, [self._last]).encode()
        with open(self._path, "r+b", buffering=0, opener=regular_files.open_own) as file:
            if self._last_start + len(line) < self._size:
                file.truncate(self._last_start)
            file.seek(self._last_start)
            written = file.write(line)
            while written < len(line):  # a full disk takes a part, and the next call fails
                written += file.write(line[written:])
        self._end = self._size = self._last_start + len(line)

    def _replace(self, rows: Sequence[Mapping[str, str]]) -> None:
        """Write a file with these rows, and a column for each value in them."""
        columns = sorted(dict.fromkeys(itertools.chain(self._columns, *rows)), key=_column_rank)
        if not self._size:  # of a run in progress, a directory that is missing was removed
            self._path.parent.mkdir(parents=True, exist_ok=True)
        regular_files.write_text(self._path, _csv(columns, [dict(zip(columns, columns, strict=True)), *rows]))
        self._load()

    def _load(self) -> None:
        lines = self._whole_lines()
        self._columns = next(csv.reader(line.decode() for line in lines[:1]), [])
        rows = self._rows()
        if any(None in row or None in row.values() or not row["step"].isdecimal() for row in rows):
            raise ValueError("a line that is no row")
        self._last = rows[-1] if rows else {}
        self._size = _size(self._path)
        self._end = sum(map(len, lines))  # less than the size if the last line is incomplete
        self._last_start = self._end - len(lines[-1]) if rows else self._end

    def _rows(self) -> list[dict[str, str]]:
        return list(csv.DictReader((line.decode() for line in self._whole_lines()[1:]), self._columns))

    def _whole_lines(self) -> list[bytes]:
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        return lines[:-1] if lines and not lines[-1].endswith(b"\n") else lines


def _is_training(metrics: Mapping[str, Any]) -> bool:
    return any(name in ("samples", WORLD) or name.startswith("train/") for name in metrics)


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        value = value.item()
    # float.__repr__ has every digit; the repr of NumPy's subclass of float would add its name
    return float.__repr__(value) if isinstance(value, float) else str(value)


def _column_rank(name: str) -> int:
    return FIRST_COLUMNS.index(name) if name in FIRST_COLUMNS else len(FIRST_COLUMNS)


def _csv(columns: Iterable[str], rows: Iterable[Mapping[str, str]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([row.get(name, "") for name in columns] for row in rows)
    return text.getvalue()


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def rows_before(run_dir: Path, step: int) -> list[tuple[int, dict[str, float]]]:
    """Return the metrics of a run's metrics.csv by step, of the steps before one; empty if the file can't be read."""
    try:
        text = regular_files.read_text(run_dir / "metrics.csv", "replace")
        rows = list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))
        return [
            (int(row["step"]), {name: float(text) for name, text in row.items() if name != "step" and text})
            for row in rows
            if int(row["step"]) < step
        ]
    except (OSError, ValueError, KeyError, csv.Error):
        return []


def purge(logger: Logger, step: int) -> None:
    """Remove what earlier starts have logged from a step on, if the logger is TensorBoard."""
    if isinstance(logger, TensorBoardLogger):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # what SummaryWriter(purge_step=step) writes: a reader drops what comes before it and has no lower step
        start = Event(step=step, session_log=SessionLog(status=SessionLog.START))
        logger.experiment.file_writer.add_event(start)


class WandbRun(WandbLogger):
    """Weights & Biases logger that continues the newest W&B run of its directory.

    Args:
        id: id of the first W&B run; those of branches have a number behind it.
        save_dir: directory of the run, which has the folder `wandb`.
        options: arguments of Lightning's WandbLogger.
    """

    def __init__(self, id: str, save_dir: str, **options: Any) -> None:
        pattern = re.compile(rf"{re.escape(id)}(-\d+)?")
        folders = (_OF_WANDB.fullmatch(path.name) for path in Path(save_dir, "wandb").glob("*run-*"))
        self._earlier = sorted((found[1], found[2]) for found in folders if found and pattern.fullmatch(found[2]))
        self._first = id
        super().__init__(id=self._earlier[-1][1] if self._earlier else id, save_dir=save_dir, **options)

    def branch(self) -> None:
        self._id = f"{self._first}-{len({run for _, run in self._earlier})}"
        self._wandb_init.update(id=self._id)

    def log_rows(self, rows: Iterable[tuple[int, dict[str, float]]]) -> None:
        for step, metrics in rows:
            self.log_metrics(metrics, step)
