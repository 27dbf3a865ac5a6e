"""What a module logs by step, by `self.log(…, on_step=True)`: over all micro batches and ranks of that step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor

from lightswitch import patches
from lightswitch.monitoring.metrics import MetricsFile
from lightswitch.monitoring.step_results import Results, is_counted


@dataclass(frozen=True)
class Part:
    """Value that a rank has logged in a micro batch.

    Attributes:
        reduce_fx: mean, sum, min or max, as of an epoch.
        weight: of the micro batch in the mean over its step.
    """

    reduce_fx: str
    value: float
    weight: float


class StepLogs:
    """Values of steps on their way to the loggers.

    Lightning sends them what rank 0 has logged in the last micro batch: another number wherever the cut of the batch is
    another. A step of an evaluation is one of its batches, and goes to the loggers that have an axis for it:
    metrics.csv has a row for each step of training.

    Args:
        share: of the ranks that read other samples than those before them, as of `LogsOfRanks`.

    Attributes:
        weight: of the micro batch that was trained on last.
    """

    def __init__(self, trainer: Trainer, share: float) -> None:
        self._trainer = trainer
        self._share = share
        self.weight = 1.0
        self._parts: list[tuple[str, str, Tensor, float]] = []  # of this step so far
        self._seen: dict[str, Tensor] = {}  # by Lightning's key, what was logged last

    def install(self) -> None:
        """Bring together from now on."""
        trainer, connector = self._trainer, self._trainer._logger_connector
        log_trained, log_evaluated = connector.update_train_step_metrics, connector.update_eval_step_metrics

        def trained() -> None:
            results = self._trainer._results
            if is_counted(self._trainer) and isinstance(results, Results):
                self._add(results)
                if not (self._trainer.fit_loop._should_accumulate() and self._is_automatic):
                    self._join(results)
            log_trained()

        def evaluated(step: int) -> None:
            loggers = trainer.loggers
            trainer.loggers = [logger for logger in loggers if not isinstance(logger, MetricsFile)]
            try:
                log_evaluated(step)
            finally:
                trainer.loggers = loggers

        patches.replace(connector, "update_train_step_metrics", trained)
        patches.replace(connector, "update_eval_step_metrics", evaluated)

    @property
    def _is_automatic(self) -> bool:
        return self._trainer.lightning_module.automatic_optimization

    def remove(self) -> None:
        """Leave what is logged to Lightning again."""
        patches.restore(self._trainer._logger_connector, "update_train_step_metrics")
        patches.restore(self._trainer._logger_connector, "update_eval_step_metrics")

    def _add(self, results: Results) -> None:
        """Take what was logged in a micro batch of a step that loggers are sent."""
        for key, value in results.logged_by_step():
            if self._seen.get(key) is not value:
                meta = results[key].meta
                fx = "mean" if meta.sync.should else meta.reduce_fx.__name__  # Lightning has brought it together
                self._parts.append((key, fx, value, self.weight))
                self._seen[key] = value

    def _join(self, results: Results) -> None:
        """Give each value of the step that of all its micro batches and ranks. Collective."""
        own: dict[str, list[Part]] = {}
        for key, fx, value, weight in self._parts:
            own.setdefault(key, []).append(Part(fx, float(value), weight))
        self._parts = []
        of_ranks = [own]
        if self._trainer.world_size > 1:
            of_ranks = [{} for _ in range(self._trainer.world_size)]
            dist.all_gather_object(of_ranks, own)
        for key in own:
            joined = whole([part for parts in of_ranks for part in parts.get(key, ())], self._share)
            self._seen[key] = results.put_of_step(key, joined)
        if own:  # what Lightning has read before, and shows until the next batch is over; reading it puts it right
            connector = self._trainer._logger_connector
            _ = connector.callback_metrics, connector.logged_metrics, connector.progress_bar_metrics


def whole(parts: Iterable[Part], share: float = 1.0) -> float:
    """Return the value of all parts together; those of no weight have read a sample that is another's."""
    counted = [part for part in parts if part.weight]
    if not counted:
        return float("nan")
    values = [part.value for part in counted]
    fx = counted[0].reduce_fx
    if fx == "mean":
        return sum(part.value * part.weight for part in counted) / sum(part.weight for part in counted)
    return {"sum": lambda: sum(values) * share, "min": lambda: min(values), "max": lambda: max(values)}[fx]()
