"""Loggers of other packages, in which a run that is resumed or branches off stays one curve."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

Rows = Iterable[tuple[int, dict[str, float]]]  # metrics by step

_MOST_METRICS = 1000  # of a request to MLflow
_OF_WANDB = re.compile(r"(?:offline-)?run-(\d+_\d+)-(.+)")  # the folder of a W&B run: its start and its id


@runtime_checkable
class Branching(Protocol):
    """Logger whose service can't remove what it has received: a branch is another run there."""

    def branch(self) -> None:
        """Begin another run, before the logger is opened."""

    def log_rows(self, rows: Rows) -> None:
        """Log the metrics that the run had before it branched off."""


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

    def log_rows(self, rows: Rows) -> None:
        for step, metrics in rows:
            self.log_metrics(metrics, step)


class MLflowRun(MLFlowLogger):
    """MLflow logger that continues the experiment's run of the same name; Lightning's logger would start a new run.

    Args:
        experiment_name: name of the experiment, which is created if it does not exist.
        run_name: name of the run to continue or start.
        tracking_uri: URI of the store; `sqlite:///…` for a local file.
        tags: words, each of which becomes a tag of the run with the value true, as in `tags.baseline = 'true'`.
        options: arguments of Lightning's MLFlowLogger.

    Raises:
        ModuleNotFoundError: MLflow, or a package that its SQLite store needs, is not installed.
    """

    def __init__(
        self, experiment_name: str, run_name: str, tracking_uri: str, tags: Sequence[str] = (), **options: Any
    ) -> None:
        needed = ["mlflow", *(["sqlalchemy", "alembic"] if tracking_uri.startswith("sqlite:") else [])]
        if missing := [name for name in needed if find_spec(name) is None]:
            raise ModuleNotFoundError(
                f"logger=mlflow needs {', '.join(needed)}; not installed: {', '.join(missing)}; "
                "type: pip install -e '.[mlflow]'"
            )
        self._store = tracking_uri
        with _alone(self._store):  # which makes the tables of a new store
            super().__init__(experiment_name, run_name, tracking_uri, tags=dict.fromkeys(tags, "true"), **options)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._initialized:
            return super().experiment
        with _alone(self._store):  # which makes the experiment
            self._run_id = self._run_id or self._earlier_run_id()
            return super().experiment

    @rank_zero_only
    def branch(self) -> None:
        if (earlier := self._earlier_run_id()) is not None:
            self._mlflow_client.update_run(earlier, status="KILLED", name=f"{self._run_name}-{earlier[:8]}")

    @rank_zero_only
    def log_rows(self, rows: Rows) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for step, row in rows for name, value in row.items()]
        for first in range(0, len(metrics), _MOST_METRICS):
            self.experiment.log_batch(self.run_id, metrics[first : first + _MOST_METRICS])

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Log hyperparameters that the run lacks: MLflow refuses changed values, which a resumed run may have."""
        known = self.experiment.get_run(self.run_id).data.params
        super().log_hyperparams({name: value for name, value in _flat(params) if name not in known})

    def _earlier_run_id(self) -> str | None:
        experiment = self._mlflow_client.get_experiment_by_name(self._experiment_name)
        if experiment is None:
            return None
        runs = self._mlflow_client.search_runs(
            [experiment.experiment_id], f"attributes.run_name = '{self._run_name}'", max_results=1
        )
        if not runs:
            return None
        run_id = str(runs[0].info.run_id)
        self._mlflow_client.update_run(run_id, status="RUNNING")
        return run_id


@contextlib.contextmanager
def _alone(store: str) -> Iterator[None]:
    """Hold a lock on the folder of a local store: processes that make its tables at once get errors of SQL."""
    if not store.startswith("sqlite:///"):
        yield
        return
    folder = Path(store.removeprefix("sqlite:///")).parent
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _flat(params: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values with the flat names that Lightning's logger gives them."""
    for name, value in (vars(params) if isinstance(params, Namespace) else params).items():
        if isinstance(value, dict | Namespace):
            yield from _flat(value, f"{path}{name}/")
        else:
            yield f"{path}{name}", value
