"""Metrics: Lightning's collection of what a module logs, made faster, and the engine's loggers, such as metrics.csv.

A run that goes back to an earlier step is one curve: rows of metrics.csv are dropped, and TensorBoard gets a mark.
"""

from __future__ import annotations

import csv
import io
import itertools
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.trainer.connectors.logger_connector.result import _METRICS, _ResultCollection, _ResultMetric
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lightswitch import regular_files

WORLD = "world"  # the number of devices, logged at the first step after a change
FIRST_COLUMNS = ("step", "samples", "epoch")


def batches(trainer: Trainer) -> int:
    """Return the number of optimizer steps, or under manual optimization of batches, including this one."""
    if trainer.lightning_module.automatic_optimization:
        return trainer.global_step
    return trainer.fit_loop.total_batch_idx + 1  # no micro-batches under manual optimization


def is_counted(trainer: Trainer) -> bool:
    """Return whether the logging interval is due at this training batch; the result is the same on all ranks."""
    every_n_steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set past Lightning's declaration
    if every_n_steps == 0:  # never log
        return False
    return (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % every_n_steps == 0


def is_logged(trainer: Trainer) -> bool:
    """Return whether to log at this training batch: the interval is due, or training stops.

    Lightning's `should_update_logs` first determines which of its loops is active, which takes time.
    """
    return is_counted(trainer) or (trainer.should_stop and trainer.log_every_n_steps > 0)  # type: ignore[attr-defined]  # likewise


class Results(_ResultCollection):
    """Result collection that reads the values of a step only once: on a GPU, each read synchronizes with the device.

    Attributes:
        of_step: values of the last step, as they were read; None if others have been logged since.
        of_batch: this rank's scalars that a batch has logged so far, by key, if they go to loggers at each step.
    """

    of_step: _METRICS | None = None

    def __init__(self, training: bool) -> None:
        super().__init__(training)
        self.of_batch: dict[str, Tensor] = {}

    def start_epoch(self) -> None:
        """Read the values of a step anew: an epoch's end has reset them."""
        self.of_step = None

    def start_batch(self, batch: Any) -> None:
        """Forget what the batch before has logged, and hold this one; None to hold none, as one may be large."""
        self.of_batch = {}
        self.batch, self.batch_size = batch, None

    def count(self, samples: int) -> None:
        """Weight what the current batch logs by its number of samples, which Lightning would guess."""
        self.batch_size = samples

    def metrics(self, on_step: bool) -> _METRICS:
        if not on_step:
            return super().metrics(on_step)
        last = self.of_step = self.of_step or super().metrics(on_step=True)
        return _METRICS(callback=dict(last["callback"]), log=dict(last["log"]), pbar=dict(last["pbar"]))

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        self.of_step = None
        super().update_metrics(key, value, batch_size)
        item = self[key]
        own = item._forward_cache
        if item.meta.on_step and item.meta.logger and isinstance(own, Tensor) and own.numel() == 1:
            self.of_batch[key] = own.detach()

    def put_of_step(self, key: str, value: float) -> None:
        """Replace the value logged for a step."""
        self.of_step = None
        own = self[key]._forward_cache
        assert isinstance(own, Tensor)
        self[key]._forward_cache = torch.full_like(own, value)

    def __setitem__(self, key: str, value: _ResultMetric) -> None:
        super().__setitem__(key, Value(value.meta, value.is_tensor))


class Value(_ResultMetric):
    """Logged value that is moved to a device only if it is on another one, and reduced over ranks by the engine.

    Lightning moves it at each `self.log`, which goes through all attributes of this torchmetrics metric and takes most
    of the call's time (Lightning-AI/pytorch-lightning#20388).
    """

    def to(self, *args: Any, **kwargs: Any) -> Value:
        if self.is_tensor and not kwargs and args == (self.value.device,):  # all its tensors are on that device
            return self
        super().to(*args, **kwargs)
        return self

    def update(self, value: Any, batch_size: int) -> None:
        """Log this rank's own value: with `sync_dist`, Lightning would wait for all ranks at each `self.log`."""
        if not self.meta.sync.should or self.meta.sync.group is not None:
            super().update(value, batch_size)
            return
        self.meta.sync.should = False
        super().update(value, batch_size)
        self.meta.sync.should = True


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
        try:
            self._table.put(step, {name: _text(value) for name, value in metrics.items()})
        except OSError as error:
            error.filename = error.filename or str(self._directory / "metrics.csv")  # a write to a full disk names none
            raise

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: a table of metrics has no place for hyperparameters, and the run directory has the config."""

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self._directory)

    @property
    def log_dir(self) -> str:
        return str(self._directory)


class MLflowRun(MLFlowLogger):
    """Lightning's MLflow logger, to which all starts of a run are one run of MLflow.

    Args:
        directory: directory of the file `mlflow_run`, which holds the id that MLflow gave the run.
        resume: the config's; with another value than `auto`, a run of MLflow begins.
        **settings: arguments of Lightning's logger.
    """

    def __init__(self, directory: str | Path, resume: str = "auto", **settings: Any) -> None:
        self._file = Path(directory, "mlflow_run")
        self._continues = resume == "auto" and self._file.exists()
        super().__init__(**settings, run_id=self._file.read_text() if self._continues else None)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Log them at the first start: MLflow refuses later ones that differ, such as the number of devices."""
        if not self._continues:
            super().log_hyperparams(params)
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(self.run_id or "")


class WandbRun(WandbLogger):
    """Lightning's logger of Weights & Biases, to which all starts of a run are one run of theirs, until one is anew.

    Args:
        directory: directory of the file `wandb_run`, which counts the starts with `resume=never`.
        id: of the first run there; later ones have the count behind it.
        resume: the config's.
        **settings: arguments of Lightning's logger.
    """

    def __init__(self, directory: str | Path, id: str, resume: str = "auto", **settings: Any) -> None:
        self._file = Path(directory, "wandb_run")
        before = int(self._file.read_text()) if self._file.exists() else None
        self._count = 0 if before is None else before + (resume == "never")
        super().__init__(**settings, id=f"{id}_{self._count}" if self._count else id)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Log them, and write the count."""
        super().log_hyperparams(params)
        regular_files.write_text(self._file, str(self._count))


class Table:
    """CSV file keyed by the column `step`: the last row is updated in place, any other change writes a new file.

    Lines that are no rows, as a crash of the machine may leave, are dropped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: list[str] = []
        self._last: dict[str, str] = {}
        self._last_start = self._end = 0  # offsets of the last row in the file, in bytes
        if rows := self._rows():
            self._replace(rows)

    @property
    def last_step(self) -> int:
        """Step of the last row, the largest; 0 in an empty table."""
        return int(self._last.get("step", 0))

    def put(self, step: int, values: Mapping[str, str]) -> None:
        """Merge values, as text by column, into the row of a step, or add the row where its step belongs."""
        if step < self.last_step or not {"step", *values} <= set(self._columns):
            self._put_anywhere(step, values)
            return
        if self._last.get("step") != str(step):  # or there is no row, because all have been dropped
            self._last = {"step": str(step), "samples": self._last.get("samples", "")}
            self._last_start = self._end
        self._last.update(values)
        self._write_last()

    def drop_after(self, step: int) -> None:
        """Drop the rows of later steps."""
        if self.last_step > step:
            self._replace([row for row in self._rows() if int(row["step"]) <= step])

    def _put_anywhere(self, step: int, values: Mapping[str, str]) -> None:
        """Write the file anew, for a new column, or for an earlier step, as in an evaluation of an older checkpoint."""
        rows = {int(row["step"]): row for row in self._rows()}
        if step in rows and step < self.last_step:
            # the row has its epoch and samples already: an evaluation reports those at the time that it runs
            values = {name: text for name, text in values.items() if name not in FIRST_COLUMNS}
        samples = "" if step < self.last_step else self._last.get("samples", "")
        rows.setdefault(step, {"step": str(step), "samples": samples}).update(values)
        self._replace([rows[one] for one in sorted(rows)])

    def _write_last(self) -> None:
        # A merged row is nearly always longer than the row it replaces. Then a single call writes it, and if the
        # process is killed meanwhile, the file has the old line or the new one.
        line = _csv(self._columns, self._last)
        with open(self._path, "r+b", buffering=0) as file:
            file.seek(self._last_start)
            written = file.write(line)
            while written < len(line):  # a full disk takes a part, and the next call fails
                written += file.write(line[written:])
            file.truncate()
        self._end = self._last_start + len(line)

    def _replace(self, rows: Sequence[dict[str, str]]) -> None:
        """Write a file with these rows, and a column for each value in them."""
        self._columns = sorted(dict.fromkeys(itertools.chain(self._columns, *rows)), key=_column_rank)
        header = dict(zip(self._columns, self._columns, strict=True))
        lines = [_csv(self._columns, row) for row in (header, *rows)]
        if not self._end:  # of a run in progress, a directory that is missing was removed
            self._path.parent.mkdir(parents=True, exist_ok=True)
        regular_files.write_text(self._path, b"".join(lines).decode())
        self._last, self._end = rows[-1] if rows else {}, sum(map(len, lines))
        self._last_start = self._end - len(lines[-1]) if rows else self._end

    def _rows(self) -> list[dict[str, str]]:
        """Return the rows of the file, without lines that are none."""
        header, *lines = [_cells(line) for line in self._lines()] or [[]]
        rows = (dict(zip(header, cells, strict=True)) for cells in lines if len(cells) == len(header))
        return [row for row in rows if row.get("step", "").isdecimal()]

    def _lines(self) -> list[bytes]:
        """Return the whole lines of the file; a process that was killed may have left a part of one, and a crash of the
        machine zeros."""
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        return [line for line in lines if line.endswith(b"\n") and b"\0" not in line]


def _is_training(metrics: Mapping[str, Any]) -> bool:
    return any(name in ("samples", WORLD) or name.startswith("train/") for name in metrics)


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        value = value.item()
    # float.__repr__ has every digit; the repr of NumPy's subclass of float would add its name
    return float.__repr__(value) if isinstance(value, float) else str(value)


def _column_rank(name: str) -> int:
    return FIRST_COLUMNS.index(name) if name in FIRST_COLUMNS else len(FIRST_COLUMNS)


def _csv(columns: Iterable[str], row: Mapping[str, str]) -> bytes:
    line = io.StringIO(newline="")
    csv.writer(line, lineterminator="\n").writerow(row.get(name, "") for name in columns)
    return line.getvalue().encode()


def _cells(line: bytes) -> list[str]:
    return next(csv.reader([line.decode(errors="replace")]), [])


def purge(logger: Logger, step: int) -> None:
    """Remove what earlier starts have logged from a step on, if the logger is TensorBoard."""
    if isinstance(logger, TensorBoardLogger):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # what SummaryWriter(purge_step=step) writes: a reader drops what comes before it and has no lower step
        start = Event(step=step, session_log=SessionLog(status=SessionLog.START))
        logger.experiment.file_writer.add_event(start)
