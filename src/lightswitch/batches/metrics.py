"""Metrics of an unfinished epoch, and what the end of a run depends on, across a resume."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum
from torchmetrics.utilities.distributed import gather_all_tensors
from torchmetrics.wrappers.abstract import WrapperMetric

from lightswitch import patches
from lightswitch.batches.plan import saved_position
from lightswitch.errors import Refused
from lightswitch.hooked_strategy import HookedStrategy
from lightswitch.mixins import callbacks_of
from lightswitch.monitoring.step_results import Logged, Results, joined

log = logging.getLogger(__name__)


OF_RANKS = "of_ranks"  # checkpoint key: a list of the entries of each rank, in numbers, lists and dictionaries
_LARGEST = 10_000  # maximum number of elements of a saved metric state; it goes through the rendezvous store
_REDUCED: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dim_zero_sum: torch.add,
    dim_zero_min: torch.minimum,
    dim_zero_max: torch.maximum,
}

State = dict[str, Any]  # values of a metric, by state name


class EpochMetrics(Callback):
    """Callback that saves the metrics of an unfinished epoch in checkpoints, and resumes from them.

    These are the values of `self.log(…, on_epoch=True)`, and the torchmetrics whose states are sums, minima or maxima
    over samples. Metrics that store the samples themselves, such as curves, only see the rest of the epoch. The saved
    values are those of all ranks, and can be resumed at any world size. Metrics that an epoch's end does not reset,
    such as the best value so far, are resumed as well. This callback must follow `GlobalBatch`, which saves the
    position.
    """

    def __init__(self) -> None:
        self._before: dict[str, Logged] = {}  # values of the resumed epoch, until training starts
        self._resumed: set[str] = set()  # names of restored metrics

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        gather_lists_whole()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if saved_position(checkpoint) is None:
            return
        results = trainer.fit_loop.epoch_loop._results
        states = _states(pl_module)
        values = {
            key: Logged.of(item)
            for key, item in results.valid_items()
            if item.meta.on_epoch and (item.is_tensor or item.meta.metric_attribute in states)
            if item.meta.sync.group is None and (trainer.is_global_zero or not item.meta.sync.rank_zero_only)
        }
        if isinstance(results, Results):
            values |= results.before
        so_far = {key: asdict(value) for key, value in values.items()}
        if so_far or states:
            checkpoint[OF_RANKS] = [{"logged": so_far, "metrics": states}]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore metrics; in an evaluation, only those with persistent states."""
        saved, is_fit = checkpoint.get(OF_RANKS, []), trainer.state.fn == TrainerFn.FITTING
        self._resumed = set()
        for name, metric in _metrics(pl_module):
            states = [of["metrics"][name] for of in saved if name in of["metrics"]]
            is_wanted = _is_kept(metric) and (is_fit or any(metric._persistent.values()))
            if states and is_wanted and set(states[0]) == set(metric._defaults):
                # metrics sum their states over ranks when computed, so only the first of these restores what was saved
                _restore(metric, _whole(metric, states) if _is_first(metric, trainer) else {})
                self._resumed.add(name)
        whole = joined([{key: Logged(**one) for key, one in of["logged"].items()} for of in saved if is_fit])
        self._before = {
            key: one
            for key, one in whole.items()
            if (trainer.is_global_zero if one.metric_attribute is None else one.metric_attribute in self._resumed)
        }

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        results = trainer.fit_loop.epoch_loop._results
        if isinstance(results, Results):
            results.before, self._before = self._before, {}
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


def gather_lists_whole() -> None:
    """Let all torchmetrics of this process gather the lists of entries that they keep whole, in the order of ranks.

    That is the order of one process, as each rank evaluates a contiguous share of the samples.
    """
    given: Callable[..., None] = vars(Metric)["_sync_dist"]
    if given.__module__ == __name__:
        return

    def _sync_dist(
        metric: Metric, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any = None
    ) -> None:
        lists = {
            name: getattr(metric, name)
            for name, reduction in metric._reductions.items()
            if reduction is not dim_zero_cat and isinstance(getattr(metric, name), list)
        }
        if not lists or dist_sync_fn is not gather_all_tensors:
            return given(metric, dist_sync_fn, process_group)
        if hasattr(metric, "_gather_tuple_list"):
            patches.replace(metric, "_gather_tuple_list", lambda list_to_gather, process_group=None: list_to_gather)
        group = process_group or metric.process_group
        of_ranks: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(of_ranks, apply_to_collection(lists, Tensor, lambda one: one.detach().cpu()), group)
        for name in lists:
            setattr(metric, name, [])  # nothing is left for torchmetrics to gather
        given(metric, dist_sync_fn, process_group)
        device = "cpu" if metric.compute_on_cpu else metric.device
        for name in lists:
            entries = [entry for of_rank in of_ranks for entry in of_rank[name]]
            whole = apply_to_collection(entries, Tensor, lambda one: one.to(device))
            reduction = metric._reductions[name]
            setattr(metric, name, reduction(whole) if whole and callable(reduction) else whole)

    patches.replace(Metric, "_sync_dist", _sync_dist)


def _states(module: LightningModule) -> dict[str, State]:
    """Return the states of the metrics that this rank saves, by name.

    Devices that share a layer have the same states, which the first of them saves.
    """
    return {
        name: _state(metric)
        for name, metric in _metrics(module)
        if metric.update_called and _is_kept(metric) and _is_saved(metric)
    }


def _is_saved(metric: Metric) -> bool:
    return metric.process_group is None or 0 in dist.get_process_group_ranks(metric.process_group)


def _is_first(metric: Metric, trainer: Trainer) -> bool:
    """Return whether this rank is the first of those over which a metric is computed."""
    if metric.process_group is None:
        return trainer.is_global_zero
    return bool(dist.get_rank(metric.process_group) == 0)


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


_KEY = "metrics"  # checkpoint key
_STOPPED_AT = "stopped_at"  # checkpoint key


class Ending(Callback):
    """Callback that saves in checkpoints what the end of a run depends on.

    That is the Trainer's `callback_metrics`, which early stopping, schedules and results.json read, and whether the run
    was asked to stop, for example by early stopping: it does not train on unless its limits have changed.
    """

    def __init__(self) -> None:
        self._metrics: dict[str, float] = {}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, object]) -> None:
        checkpoint[_KEY] = {name: value.item() for name, value in trainer.callback_metrics.items()}
        if trainer.should_stop:
            checkpoint[_STOPPED_AT] = _limits(trainer)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, object]) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        metrics = checkpoint.get(_KEY, {})
        self._metrics = metrics if isinstance(metrics, dict) else {}
        stopped_at = checkpoint.get(_STOPPED_AT)
        if isinstance(stopped_at, list) and stopped_at == _limits(trainer)[: len(stopped_at)]:
            trainer.should_stop = True
        # its batches would count in metrics that go on over validations, such as the best value so far
        trainer.num_sanity_val_steps = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the metrics.

        Raises:
            Refused: a schedule reads a metric of validation in epochs without a validation.
        """
        metrics = {name: torch.tensor(value, dtype=torch.float64) for name, value in self._metrics.items()}
        trainer._logger_connector._callback_metrics.update(metrics)
        _refuse_unvalidated(trainer)


def _limits(trainer: Trainer) -> list[float | None]:
    callbacks = callbacks_of(trainer)
    timers = [callback._duration for callback in callbacks if isinstance(callback, Timer)]
    patience = [callback.patience for callback in callbacks if isinstance(callback, EarlyStopping)]
    return [trainer.max_steps, trainer.max_epochs, *timers, *patience]


def _refuse_unvalidated(trainer: Trainer) -> None:
    if not trainer.lightning_module.automatic_optimization:  # Lightning steps no schedule
        return
    every = trainer.check_val_every_n_epoch or 1
    for config in (config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau):
        of_validation = str(config.monitor).lower().startswith(("val", "eval"))
        if config.interval == "epoch" and config.frequency % every and config.strict and of_validation:
            raise Refused(
                f"ReduceLROnPlateau reads {config.monitor} every {config.frequency} epochs, but validation "
                f'runs every {every}; in configure_optimizers, write "frequency": {every} beside '
                '"monitor", or type trainer.check_val_every_n_epoch=1'
            )
