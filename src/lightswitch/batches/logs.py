"""Combination of what ranks and micro-batches log, before it reaches loggers and callbacks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from lightswitch import patches
from lightswitch.mixins import Mixin, with_mixin
from lightswitch.monitoring.metrics import MetricsFile
from lightswitch.monitoring.step_results import Logged, Results, is_counted, joined, logged

_Any = TypeVar("_Any")


class Connector(Mixin, _LoggerConnector):
    """Connector of logged values to loggers and callbacks that combines those of ranks and micro-batches first.

    In an evaluation, a step is one batch; its values only go to loggers with an axis for them, not to metrics.csv,
    which has one row per training step.
    """

    _steps: StepLogs | None = None
    _ranks: LogsOfRanks | None = None
    _repeated: RepeatedSamples | None = None

    @classmethod
    def of(cls, trainer: Trainer) -> Connector:
        """Return the Trainer's connector; it is replaced if it is Lightning's."""
        connector = with_mixin(cls, trainer._logger_connector)
        patches.replace(trainer, "_logger_connector", connector)
        return connector

    def combine(
        self, steps: StepLogs | None, ranks: LogsOfRanks | None = None, repeated: RepeatedSamples | None = None
    ) -> None:
        """Combine values from now on; without arguments of a kind, such values stay as they are."""
        self._steps, self._ranks, self._repeated = steps, ranks, repeated

    def epoch_end_reached(self) -> None:
        super().epoch_end_reached()
        if isinstance(results := self.trainer._results, Results):
            results.log_before(self.trainer)
        if self._ranks is not None:
            self._ranks.join()

    def on_epoch_end(self) -> None:
        if self._ranks is not None:
            self._ranks.join()
        super().on_epoch_end()

    def on_batch_start(self, batch: Any, dataloader_idx: int | None = None) -> None:
        super().on_batch_start(batch, dataloader_idx)
        if isinstance(results := self.trainer._results, Results):
            results.of_batch = {}

    def count(self, samples: int | None) -> None:
        """Weight what the current batch logs by its number of samples; None lets Lightning guess it from the batch.

        Lightning takes the first dimension of the first tensor that it finds, which may be the length of a sample.
        """
        if samples is not None and isinstance(results := self.trainer._results, Results):
            results.count(samples)
        elif samples is not None:
            patches.replace(results, "batch_size", samples)

    def on_batch_end(self) -> None:
        super().on_batch_end()
        if self._repeated is not None:
            self._repeated.undo()

    def update_train_step_metrics(self) -> None:
        if self._steps is not None:
            self._steps.join_step()
        super().update_train_step_metrics()

    def update_eval_step_metrics(self, step: int) -> None:
        loggers = self.trainer.loggers
        self.trainer.loggers = [logger for logger in loggers if not isinstance(logger, MetricsFile)]
        try:
            super().update_eval_step_metrics(step)
        finally:
            self.trainer.loggers = loggers


class LogsOfRanks:
    """Combination of the values that a Trainer's ranks log, at two moments that all ranks reach.

    These are the end of the last batch of an epoch or evaluation, before hooks are called, and the end of those hooks.

    Args:
        share: number of data-parallel ranks divided by the world size; tensor-parallel ranks read the same samples.
    """

    def __init__(self, trainer: Trainer, share: float) -> None:
        self._trainer = trainer
        self._share = share
        self._joined: dict[str, Tensor] = {}  # by Lightning's key, the combined value, until another one is logged

    def join(self) -> None:
        """Set each value to that of all ranks, including values that this rank has not logged. Collective."""
        results = self._trainer._results
        assert results is not None
        own = {
            key: item
            for key, item in logged(results).items()
            if not _is_left_to_lightning(item) and self._joined.get(key) is not item.value
        }
        of_ranks = _of_ranks({key: Logged.of(item) for key, item in own.items()}, self._trainer)
        for key, whole in joined(of_ranks).items():
            if key not in own:
                whole.log_name(results, self._trainer)
            item = results[key]
            vars(item).update(_attributes(whole, item.value, self._share))
            self._joined[key] = item.value


def _of_ranks(own: dict[str, _Any], trainer: Trainer) -> list[dict[str, _Any]]:
    """Return the dictionaries of all ranks. Collective."""
    of_ranks = [own]
    if trainer.world_size > 1:
        of_ranks = [{} for _ in range(trainer.world_size)]
        dist.all_gather_object(of_ranks, own)
    return of_ranks


def _is_left_to_lightning(item: _ResultMetric) -> bool:
    """Return whether the user logs the value of rank zero alone, or that of a group of ranks."""
    return bool(item.meta.sync.rank_zero_only or item.meta.sync.group is not None)


def _attributes(whole: Logged, like: Tensor, share: float) -> dict[str, Tensor]:
    """Return the attributes of an item of Lightning's with the value of all ranks.

    It counts as computed, so with `sync_dist` Lightning does not wait for ranks that have not logged the name.
    """
    tensor = partial(torch.tensor, device=like.device)
    if whole.reduce_fx == "mean":
        value, samples = tensor(whole.value, dtype=like.dtype), tensor(whole.samples)
        return {"value": value, "cumulated_batch_size": samples, "_computed": value / samples}
    value = tensor(whole.value * share if whole.reduce_fx == "sum" else whole.value, dtype=like.dtype)
    return {"value": value, "_computed": value}


@dataclass(frozen=True)
class Part:
    """Value that a rank has logged in a micro-batch.

    Attributes:
        reduce_fx: mean, sum, min or max, as over an epoch.
        weight: weight of the micro-batch in the mean over its step.
    """

    reduce_fx: str
    value: float
    weight: float


class StepLogs:
    """Step values, combined over micro-batches and ranks before they reach the loggers.

    Lightning sends the value that rank zero logged in the last micro-batch, which depends on how the batch is split;
    with `sync_dist`, the mean of ranks whose slices may differ in size.

    Args:
        share: see `LogsOfRanks`.

    Attributes:
        weight: weight of the last micro-batch that was trained on.
    """

    def __init__(self, trainer: Trainer, share: float) -> None:
        self._trainer = trainer
        self._share = share
        self.weight = 1.0
        self._values: list[tuple[str, Tensor, float]] = []  # of this step so far, with weights, by Lightning's key

    def join_step(self) -> None:
        """Combine the values that are due to be logged with this batch, once it ends a step. Collective."""
        results = self._trainer._results
        if is_counted(self._trainer) and isinstance(results, Results):
            self._values += [(key, value, self.weight) for key, value in results.of_batch.items()]
            if not (self._trainer.fit_loop._should_accumulate() and self._is_automatic):
                self._join(results)

    @property
    def _is_automatic(self) -> bool:
        return self._trainer.lightning_module.automatic_optimization

    def _join(self, results: Results) -> None:
        """Set each value of the step to that of all its micro-batches and ranks. Collective."""
        own: dict[str, list[Part]] = {}
        for key, value, weight in self._values:
            own.setdefault(key, []).append(Part(results[key].meta.reduce_fx.__name__, float(value), weight))
        self._values = []
        of_ranks = _of_ranks(own, self._trainer)
        names = dict.fromkeys(key for parts in of_ranks for key in parts)
        if any(parts.keys() != names.keys() for parts in of_ranks):
            items = {key: results[key] for key in own}
            shared = {key: Logged.of(item) for key, item in items.items() if not _is_left_to_lightning(item)}
            for key, record in joined(_of_ranks(shared, self._trainer)).items():
                if key not in own:
                    record.log_name(results, self._trainer)
        for key in names.keys() & results.keys():
            parts = itertools.chain.from_iterable(parts.get(key, ()) for parts in of_ranks)
            results.put_of_step(key, whole(parts, self._share))
        if names:  # refresh the metrics that Lightning has cached, and shows until the next batch ends
            connector = self._trainer._logger_connector
            _ = connector.callback_metrics, connector.logged_metrics, connector.progress_bar_metrics


def whole(parts: Iterable[Part], share: float = 1.0) -> float:
    """Return the combined value of all parts, except those of weight 0, which repeat a sample of another slice."""
    counted = [part for part in parts if part.weight]
    if not counted:
        return float("nan")
    values = [part.value for part in counted]
    fx = counted[0].reduce_fx
    if fx == "mean":
        return sum(part.value * part.weight for part in counted) / sum(part.weight for part in counted)
    return {"sum": lambda: sum(values) * share, "min": lambda: min(values), "max": lambda: max(values)}[fx]()


class RepeatedSamples:
    """Undo the changes that a batch of a repeated sample makes to logged values and metrics, after its hooks have run.

    A rank repeats a sample if a step has fewer samples than slices. Data that a module collects itself, for example in
    a list, still contains the repeated sample.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer, self._module = trainer, module
        self._metrics: dict[Metric, dict[str, Any]] | None = None  # their states before the batch
        self._logged: dict[str, dict[str, Any]] = {}  # attributes of the logged values before it

    def begin(self) -> None:
        """Save metrics and logged values before a batch that repeats a sample."""
        metrics = (module for module in self._module.modules() if isinstance(module, Metric))
        self._metrics = {metric: metric._copy_state_dict() for metric in metrics}
        self._logged = {key: dict(vars(item)) for key, item in self._results.items() if item.is_tensor}

    @property
    def _results(self) -> _ResultCollection:
        results = self._trainer._results
        assert results is not None
        return results

    def undo(self) -> None:
        """Undo the changes, if the batch that has ended repeats a sample."""
        if self._metrics is None:
            return
        for metric, states in self._metrics.items():
            for name, before in states.items():
                is_cat = metric._reductions[name] is dim_zero_cat
                setattr(metric, name, _without(getattr(metric, name), before) if is_cat else before)
        for key, item in self._results.items():
            if item.is_tensor and not item.has_reset:
                _set_back(item, self._logged.get(key))
        self._metrics = None


def _without(state: Any, before: Any) -> Any:
    """Return a metric's state before a batch; in a list state, empty tensors of the same shape replace added rows."""
    if not isinstance(state, list):
        return before
    return [*before, *(rows[:0] for rows in state[len(before) :] if isinstance(rows, Tensor) and rows.ndim)]


def _set_back(item: _ResultMetric, before: dict[str, Any] | None) -> None:
    """Restore a logged value; reset it if it is new or belonged to an earlier evaluation."""
    if before is not None and not before["has_reset"]:
        vars(item).update(before)
    else:
        Metric.reset(item)  # not Lightning's reset, which would mark the value as never logged
