"""Metrics logged over all ranks and micro-batches of a step, an epoch or an evaluation, also across a resume."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_max, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers.abstract import WrapperMetric

from lightswitch import patches
from lightswitch.batches.plan import Position, saved_position
from lightswitch.hooked_strategy import HookedStrategy
from lightswitch.monitoring.metrics import MetricsFile
from lightswitch.monitoring.step_results import Logged, Results, is_counted, joined, logged

log = logging.getLogger(__name__)


OF_RANKS = "of_ranks"  # checkpoint key: a list of the entries of each rank, in numbers, lists and dictionaries
_LARGEST = 10_000  # maximum number of elements of a saved metric state; it goes through the rendezvous store
_REDUCED: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dim_zero_sum: torch.add,
    dim_zero_min: torch.minimum,
    dim_zero_max: torch.maximum,
}

State = dict[str, Any]  # values of a metric, by state name


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

    def install(self) -> None:
        """Start combining values."""
        connector = self._trainer._logger_connector
        reach_end, end = connector.epoch_end_reached, connector.on_epoch_end

        def reached() -> None:
            reach_end()
            self._join()

        def ended() -> None:
            self._join()
            end()

        patches.replace(connector, "epoch_end_reached", reached)
        patches.replace(connector, "on_epoch_end", ended)

    def remove(self) -> None:
        """Restore Lightning's methods."""
        patches.restore(self._trainer._logger_connector, "epoch_end_reached")
        patches.restore(self._trainer._logger_connector, "on_epoch_end")

    def _join(self) -> None:
        """Set each value to that of all ranks, including values that this rank has not logged. Collective."""
        results = self._trainer._results
        assert results is not None
        own = {
            key: item
            for key, item in logged(results).items()
            if not _is_left_to_lightning(item) and self._joined.get(key) is not item.value
        }
        of_ranks: list[dict[str, Logged]] = [{} for _ in range(self._trainer.world_size)]
        dist.all_gather_object(of_ranks, {key: Logged.of(item) for key, item in own.items()})
        for key, whole in joined(of_ranks).items():
            if key not in own:
                whole.log_name(results, self._trainer.strategy)
            item = results[key]
            item.reset()
            results.update_metrics(key, *_update(whole, item.value, self._share))
            self._joined[key] = item.value


def _is_left_to_lightning(item: _ResultMetric) -> bool:
    """Return whether the user lets Lightning synchronize a value, or logs the value of rank zero alone."""
    return bool(item.meta.sync.should or item.meta.sync.rank_zero_only)


def _update(whole: Logged, like: Tensor, share: float) -> tuple[Tensor, float]:
    """Return the value and batch size that update an empty item of Lightning's to the value of all ranks."""
    value = whole.value
    if whole.reduce_fx == "mean":
        value = value / whole.samples if whole.samples else float("nan")
    elif whole.reduce_fx == "sum":
        value *= share
    return torch.tensor(value, dtype=like.dtype, device=like.device), whole.samples


class EpochMetrics(Callback):
    """Callback that saves the metrics of an unfinished epoch in checkpoints, and resumes from them.

    These are the values of `self.log(…, on_epoch=True)`, and the torchmetrics whose states are sums, minima or maxima
    over samples. Metrics that store the samples themselves, such as curves, only see the rest of the epoch. The saved
    values are those of all ranks, and can be resumed at any world size. Metrics that an epoch's end does not reset,
    such as the best value so far, are resumed as well. This callback must follow `GlobalBatch`, which saves the
    position.
    """

    def __init__(self) -> None:
        self._of_validation: frozenset[str] = frozenset()  # metrics without updates when validation began
        self._saved: list[dict[str, Any]] = []
        self._resumed: set[str] = set()  # names of restored metrics

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._of_validation = frozenset(name for name, metric in _metrics(pl_module) if not metric.update_called)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        position = saved_position(checkpoint)
        if position is None:
            return
        results = trainer.fit_loop.epoch_loop._results
        values = {key: Logged.of(item) for key, item in logged(results).items()}
        if isinstance(results, Results):
            values |= results.before
        so_far = {key: asdict(value) for key, value in values.items()} if position.step else {}
        anew = self._of_validation if trainer.validating and position.validation_due else frozenset()
        over = _over(trainer, position)
        states = {
            name: _state(metric)
            for name, metric in _metrics(pl_module)
            if metric.update_called and _is_kept(metric) and name not in anew and id(metric) not in over
        }
        if so_far or states:
            checkpoint[OF_RANKS] = [{"logged": so_far, "metrics": states}]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore metrics before a validation that was due; in an evaluation, only those with persistent states."""
        saved, is_fit = checkpoint.get(OF_RANKS, []), trainer.state.fn == TrainerFn.FITTING
        self._saved, self._resumed = saved if is_fit else [], set()
        for name, metric in _metrics(pl_module):
            states = [of["metrics"][name] for of in saved if name in of["metrics"]]
            is_wanted = _is_kept(metric) and (is_fit or any(metric._persistent.values()))
            if states and is_wanted and set(states[0]) == set(metric._defaults):
                # metrics sum their states over ranks when computed, so only rank zero restores the saved values
                _restore(metric, _whole(metric, states) if trainer.is_global_zero else {})
                self._resumed.add(name)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        saved, self._saved = self._saved, []
        results = trainer.fit_loop.epoch_loop._results
        if trainer.is_global_zero and isinstance(results, Results):
            results.before = joined([{key: Logged(**one) for key, one in of["logged"].items()} for of in saved])
        kept = {name: _state(metric) for name, metric in self._going_on(pl_module) if metric.update_called}
        strategy = HookedStrategy.of(trainer)
        strategy.on_start = partial(self._undo_resets, pl_module, kept)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = HookedStrategy.of(trainer)
        strategy.on_start = None

    def _undo_resets(self, module: LightningModule, kept: Mapping[str, State]) -> None:
        """Restore metrics that the module's `on_train_start` has reset, as many do after the sanity check."""
        for name, metric in self._going_on(module):
            if name in kept and not metric.update_called:
                _restore(metric, _whole(metric, [kept[name]]))

    def _going_on(self, module: LightningModule) -> Iterator[tuple[str, Metric]]:
        return ((name, metric) for name, metric in _metrics(module) if name in self._resumed)


def _over(trainer: Trainer, position: Position) -> set[int]:
    """Return the ids of the metrics that were logged in a finished epoch or validation.

    Lightning resets them once all hooks have run.
    """
    loop = trainer.fit_loop.epoch_loop
    ended = [] if position.step else [loop._results]
    ended += [loop.val_loop._results] if trainer.validating else []
    return {id(item.value) for results in ended for item in results.values() if not item.is_tensor}


def _metrics(module: LightningModule) -> Iterator[tuple[str, Metric]]:
    for part in module.modules():
        if isinstance(part, MetricCollection):
            part.values()  # in a compute group, only one metric is updated; this call shares its state with the others
    return ((name, part) for name, part in module.named_modules() if isinstance(part, Metric))


def _is_kept(metric: Metric) -> bool:
    """Return whether a metric's states can be combined, hold all of its data (unlike a wrapper's) and are small."""
    are_added = all(
        isinstance(default, Tensor) and metric._reductions[name] in _REDUCED
        for name, default in metric._defaults.items()
    )
    return (
        are_added
        and not isinstance(metric, WrapperMetric)
        and 0 < sum(getattr(metric, name).numel() for name in metric._defaults) <= _LARGEST
    )


def _state(metric: Metric) -> State:
    return {name: getattr(metric, name).tolist() for name in metric._defaults}


def _restore(metric: Metric, states: Mapping[str, Tensor]) -> None:
    metric.reset()
    metric.load_state_dict(states, strict=False)
    patches.replace(metric, "_update_count", 1)  # so that it is saved again, and computed without a warning


def _whole(metric: Metric, states: Iterable[State]) -> Mapping[str, Tensor]:
    """Return the states of a metric, combined over ranks."""
    whole: dict[str, Tensor] = {}
    for name, values in itertools.chain.from_iterable(state.items() for state in states):
        own = getattr(metric, name)
        part = torch.tensor(values, dtype=own.dtype, device=own.device)
        whole[name] = _REDUCED[metric._reductions[name]](whole[name], part) if name in whole else part
    return whole


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

    Lightning sends the value that rank zero logged in the last micro-batch, which depends on how the batch is split. In
    an evaluation, a step is one batch; its values only go to loggers with an axis for them, not to metrics.csv, which
    has one row per training step.

    Args:
        share: see `LogsOfRanks`.

    Attributes:
        weight: weight of the last micro-batch that was trained on.
    """

    def __init__(self, trainer: Trainer, share: float) -> None:
        self._trainer = trainer
        self._share = share
        self.weight = 1.0
        self._parts: list[tuple[str, str, Tensor, float]] = []  # of this step so far
        self._seen: dict[str, Tensor] = {}  # by Lightning's key, the value that was logged last

    def install(self) -> None:
        """Start combining values."""
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
        """Restore Lightning's methods."""
        patches.restore(self._trainer._logger_connector, "update_train_step_metrics")
        patches.restore(self._trainer._logger_connector, "update_eval_step_metrics")

    def _add(self, results: Results) -> None:
        """Collect the step values that a micro-batch has logged for loggers."""
        for key, value in results.logged_by_step():
            if self._seen.get(key) is not value:
                meta = results[key].meta
                fx = "mean" if meta.sync.should else meta.reduce_fx.__name__  # Lightning has synchronized it
                self._parts.append((key, fx, value, self.weight))
                self._seen[key] = value

    def _join(self, results: Results) -> None:
        """Set each value of the step to that of all its micro-batches and ranks. Collective."""
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
        if own:  # refresh the metrics that Lightning has cached, and shows until the next batch ends
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


_KEY = "metrics"  # checkpoint key
_PLATEAU_KEY = "plateau"  # checkpoint key


class Ending(Callback):
    """Callback that saves the Trainer's `callback_metrics` in checkpoints.

    Early stopping, schedulers and results.json depend on them, but Lightning does not save them. Data that the module
    itself collects over an epoch, for example in a list, is lost with its process: if a run is resumed after an epoch's
    last batch and the module's `on_train_epoch_end` therefore fails, the run logs a warning and continues. This
    callback must precede `GlobalBatch`, which runs the validation that was due.
    """

    def __init__(self) -> None:
        self._metrics: dict[str, float] = {}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, object]) -> None:
        checkpoint[_KEY] = {name: value.item() for name, value in trainer.callback_metrics.items()}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, object]) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            metrics = checkpoint.get(_KEY, {})
            self._metrics = metrics if isinstance(metrics, dict) else {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = {name: torch.tensor(value, dtype=torch.float64) for name, value in self._metrics.items()}
        trainer._logger_connector._callback_metrics.update(metrics)
        if trainer.ckpt_path is not None:
            patches.replace(pl_module, "on_train_epoch_end", _lenient(trainer, pl_module.on_train_epoch_end))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        patches.restore(pl_module, "on_train_epoch_end")


def _lenient(trainer: Trainer, end: Callable[[], None]) -> Callable[[], None]:
    progress, epoch = trainer.fit_loop.epoch_loop.batch_progress, trainer.current_epoch
    begun_before = progress.total.ready

    @functools.wraps(end)  # its __module__ shows whether the method is the user's
    def attempt() -> None:
        try:
            end()
        except Exception as error:
            if progress.total.ready != begun_before:  # the module has seen batches of the epoch
                raise
            log.warning(
                "epoch %d was interrupted before its end: on_train_epoch_end fails without the data that the module "
                "had collected (%s: %s); the run continues without it", epoch, type(error).__name__, error,
            )  # fmt: skip

    return attempt


class PlateauState(Callback):
    """Callback that saves in checkpoints which steps of ReduceLROnPlateau were due.

    A checkpoint after a batch is written before the validation and the scheduler step that follow it. This callback
    must follow `GlobalBatch`, which runs the validation that was due.
    """

    def __init__(self) -> None:
        self._due: list[int] = []

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        plateaus, position = _plateaus(trainer), saved_position(checkpoint)
        if not plateaus or position is None:
            return
        checkpoint[_PLATEAU_KEY] = {
            "due": [index for index, config in plateaus.items() if _is_due(config, trainer, position)]
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._due = checkpoint.get(_PLATEAU_KEY, {}).get("due", [])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the scheduler steps that were due, with the metrics of the due validation, or else the saved metrics."""
        for index, config in _plateaus(trainer).items():
            metric = trainer.callback_metrics.get(str(config.monitor))
            if index in self._due and metric is not None:
                call._call_lightning_module_hook(trainer, "lr_scheduler_step", config.scheduler, metric)
        self._due = []


def _plateaus(trainer: Trainer) -> dict[int, LRSchedulerConfig]:
    """Return the schedulers that step by a metric, by index. Lightning steps none under manual optimization."""
    if not trainer.lightning_module.automatic_optimization:
        return {}
    return {index: config for index, config in enumerate(trainer.lr_scheduler_configs) if config.reduce_on_plateau}


def _is_due(config: LRSchedulerConfig, trainer: Trainer, position: Position) -> bool:
    """Return whether a scheduler steps after the batch or epoch that has just ended, and has not done so yet."""
    loop = trainer.fit_loop
    if config.interval == "epoch":
        is_ahead, count = loop.epoch_progress.current.completed < position.epoch, trainer.current_epoch + 1
    else:
        is_ahead, count = loop.epoch_loop._batches_that_stepped < position.steps, loop.epoch_loop.batch_idx + 1
    return is_ahead and count % config.frequency == 0
