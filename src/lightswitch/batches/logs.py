"""What a module logs, combined over ranks and micro-batches before it reaches loggers and callbacks; its metrics."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _METRICS, _ResultMetric
from lightning.pytorch.trainer.states import RunningStage
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum
from torchmetrics.utilities.distributed import gather_all_tensors
from torchmetrics.wrappers.abstract import WrapperMetric

from lightswitch import patches
from lightswitch.collectives import of_ranks
from lightswitch.hooked_strategy import Mixin, with_mixin
from lightswitch.monitoring.metrics import MetricsFile, Results, is_counted, is_logged

# What a rank has logged under a name: the name for loggers; mean, sum, min or max; the value; its weight in a mean
Part = tuple[str, str, float, float]


class LogsOfRanks(Mixin, _LoggerConnector):
    """Connector of logged values to loggers and callbacks that combines those of all ranks and micro-batches first.

    It does so at three moments that all ranks reach: the end of an optimizer step that is logged, the end of the last
    batch of an epoch or evaluation, and the end of its hooks. So `self.log` itself waits for no other rank.
    """

    _of_others: tuple[Any, dict[str, Tensor]] | None = None  # a loop's results, and what other ranks alone have logged
    _share: float | None = None  # data-parallel ranks by the world size; None combines nothing
    weight = 1.0  # of the last micro-batch in the mean over its step

    @classmethod
    def of(cls, trainer: Trainer) -> LogsOfRanks:
        """Return the Trainer's connector; it is replaced if it is Lightning's."""
        connector = with_mixin(cls, trainer._logger_connector)
        patches.replace(trainer, "_logger_connector", connector)
        return connector

    def combine(self, share: float) -> None:
        """Combine values from now on.

        Args:
            share: number of data-parallel ranks by the world size: tensor-parallel ranks read the same samples.
        """
        self._share = share
        self._of_step: list[tuple[str, Part]] = []  # of the micro-batches so far, by Lightning's key
        self._combined: dict[str, Tensor] = {}  # values of an epoch that are those of all ranks, by Lightning's key
        self._of_others = None

    @property
    def should_update_logs(self) -> bool:
        """Whether to log at this batch. Lightning first determines which of its loops is active, which takes time."""
        is_training = self.trainer.state.stage is RunningStage.TRAINING
        return is_logged(self.trainer) if is_training else bool(super().should_update_logs)

    @property
    def metrics(self) -> _METRICS:
        found: _METRICS = super().metrics
        if not self._of_others or self._of_others[0] is not self.trainer._results:
            return found
        others = self._of_others[1]
        return _METRICS(callback=others | found["callback"], log=others | found["log"], pbar=found["pbar"])

    def reset_results(self) -> None:
        super().reset_results()
        self._of_others = None

    def update_train_step_metrics(self) -> None:
        if self._share is not None and is_counted(self.trainer):
            self._combine_step()
        super().update_train_step_metrics()

    def epoch_end_reached(self) -> None:
        super().epoch_end_reached()
        self._of_others = None  # of its steps
        self._combine_epoch()

    def on_epoch_end(self) -> None:
        self._combine_epoch()
        super().on_epoch_end()

    def update_eval_step_metrics(self, step: int) -> None:
        """Log values of an evaluation's batch, but not to metrics.csv, which has a row for each training step."""
        loggers = self.trainer.loggers
        self.trainer.loggers = [logger for logger in loggers if not isinstance(logger, MetricsFile)]
        try:
            super().update_eval_step_metrics(step)
        finally:
            self.trainer.loggers = loggers

    def _combine_step(self) -> None:
        """Set each value of a step, once it ends, to that of all its micro-batches and ranks. Collective."""
        trainer, results = self.trainer, self.trainer._results
        assert isinstance(results, Results)
        for key, value in results.of_batch.items():
            item = results[key]
            name = results._forked_name(item, on_step=True)[1]
            self._of_step.append((key, (name, item.meta.reduce_fx.__name__, float(value), self.weight)))
        if trainer.fit_loop._should_accumulate() and trainer.lightning_module.automatic_optimization:
            return
        own: dict[str, list[Part]] = {}
        for key, part in self._of_step:
            own.setdefault(key, []).append(part)
        self._of_step = []
        combined = self._of_all_ranks(own)
        for key, parts in combined.items():
            if key in results and results[key]._forward_cache is not None:
                results.put_of_step(key, self._whole(parts))
            else:
                self._add_of_others(results, parts)
        if combined:  # refresh the metrics that Lightning has cached, and shows until the next batch ends
            _ = self.callback_metrics, self.logged_metrics, self.progress_bar_metrics

    def _combine_epoch(self) -> None:
        """Set each value of an epoch or evaluation to that of all ranks, unless it is so already. Collective."""
        results = self.trainer._results
        if self._share is None or self.trainer.world_size == 1 or results is None:
            return
        items: dict[str, _ResultMetric] = {
            key: item
            for key, item in results.valid_items()
            if item.is_tensor and item.meta.on_epoch and self._combined.get(key) is not item.value
            if not item.meta.sync.rank_zero_only
            and item.meta.sync.group is None  # the user's choice, left to Lightning
        }
        own: dict[str, list[Part]] = {}
        for key, item in items.items():
            samples = item.cumulated_batch_size.item() if item.meta.is_mean_reduction else 1
            value = item.value.item() / samples if samples else 0.0
            own[key] = [(results._forked_name(item, on_step=False)[1], item.meta.reduce_fx.__name__, value, samples)]
        for key, parts in self._of_all_ranks(own).items():
            value, samples = self._whole(parts), sum(weight for *_, weight in parts)
            if (own_item := items.get(key)) is None:
                self._add_of_others(results, parts)
                continue
            like = own_item.value
            if own_item.meta.is_mean_reduction:
                own_item.cumulated_batch_size = torch.tensor(samples, device=like.device)
            own_item.value = like.new_tensor(value * samples if own_item.meta.is_mean_reduction else value)
            own_item._computed = like.new_tensor(value)  # so that with `sync_dist` Lightning waits for no rank
            self._combined[key] = own_item.value

    def _add_of_others(self, results: Any, parts: list[Part]) -> None:
        """Let loggers and callbacks have a value that this rank has not logged, until its epoch is over."""
        if self._of_others is None or self._of_others[0] is not results:
            self._of_others = results, {}
        self._of_others[1][parts[0][0]] = torch.tensor(self._whole(parts))

    def _of_all_ranks(self, own: dict[str, list[Part]]) -> dict[str, list[Part]]:
        """Return the parts that all ranks have logged. Collective."""
        every = of_ranks(own)
        keys = dict.fromkeys(key for parts in every for key in parts)
        return {key: [*itertools.chain.from_iterable(parts.get(key, ()) for parts in every)] for key in keys}

    def _whole(self, parts: Iterable[Part]) -> float:
        """Return the combined value of all parts, without those of weight 0, which repeat a sample of another slice."""
        counted = [part for part in parts if part[3]]
        if not counted:
            return float("nan")
        (_, fx, *_), values = counted[0], [value for *_, value, _ in counted]
        if fx == "mean":
            return sum(value * weight for *_, value, weight in counted) / sum(weight for *_, weight in counted)
        return sum(values) * (self._share or 1.0) if fx == "sum" else {"min": min, "max": max}[fx](values)


OF_RANKS = "of_ranks"  # checkpoint key: a list of the entries of each rank, in numbers, lists and dictionaries
_LARGEST = 10_000  # maximum number of elements of a saved metric state; each save sends it to all ranks
_REDUCED: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dim_zero_sum: torch.add,
    dim_zero_min: torch.minimum,
    dim_zero_max: torch.maximum,
}


class MetricStates:
    """States of the module's torchmetrics in checkpoints: of an unfinished epoch, and of the best value so far.

    These are sums, minima and maxima over samples, of all ranks, so that they resume at any world size. Metrics that
    store the samples themselves, such as curves, only see the rest of the epoch; so do means that `self.log` takes.
    """

    def __init__(self) -> None:
        self._saved: list[Any] = []  # entries of ranks, until training starts

    def save(self, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Store the states of all ranks, of devices that share a layer once. Collective."""
        states = {
            name: {state: getattr(metric, state).tolist() for state in metric._defaults}
            for name, metric in _metrics(module)
            if metric.update_called and _is_kept(metric)
            if metric.process_group is None or 0 in dist.get_process_group_ranks(metric.process_group)
        }
        if found := [{"metrics": one} for one in of_ranks(states) if one]:
            checkpoint[OF_RANKS] = found

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Keep the states of a checkpoint for `restore`."""
        self._saved = checkpoint.get(OF_RANKS, [])

    def restore(self, module: LightningModule, trains: bool = True) -> None:
        """Restore the states, after the module's `on_train_start`, in which many reset metrics of the sanity check.

        Metrics sum their states over ranks when they are computed, so only the first rank restores what was saved.

        Args:
            trains: whether to restore all; an evaluation has those that are part of the module's state, of each rank.
        """
        saved, self._saved = self._saved, []
        for name, metric in _metrics(module):
            is_asked = trains or any(metric._persistent.values())
            states = [of["metrics"][name] for of in saved if is_asked and name in of["metrics"]]
            if not states or not _is_kept(metric) or set(states[0]) != set(metric._defaults):
                continue
            metric.reset()
            if not dist.is_initialized() or dist.get_rank(metric.process_group) == 0:
                for state in metric._defaults:
                    own = getattr(metric, state)
                    parts = [torch.tensor(one[state], dtype=own.dtype, device=own.device) for one in states]
                    setattr(metric, state, functools.reduce(_REDUCED[metric._reductions[state]], parts))
            patches.replace(metric, "_update_count", 1)  # so that it is saved again, and computed without a warning


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
    elements = sum(getattr(metric, name).numel() for name in metric._defaults) if are_added else 0
    return 0 < elements <= _LARGEST and not isinstance(metric, WrapperMetric)


def gather_lists_whole() -> None:
    """Let all torchmetrics of this process gather the lists of entries that they keep whole, in the order of ranks.

    Ranks may differ by a sample in an evaluation, so torchmetrics, which gathers entry by entry, would wait forever.
    """
    given: Callable[..., None] = vars(Metric)["_sync_dist"]
    if given.__module__ == __name__:
        return

    def _sync_dist(
        self: Metric, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any = None
    ) -> None:
        reductions: dict[str, Any] = self._reductions
        values = {name: getattr(self, name) for name, kind in reductions.items() if kind is not dim_zero_cat}
        lists = {name: value for name, value in values.items() if isinstance(value, list)}
        if not lists or dist_sync_fn is not gather_all_tensors:
            return given(self, dist_sync_fn, process_group)
        if hasattr(self, "_gather_tuple_list"):
            patches.replace(self, "_gather_tuple_list", lambda list_to_gather, process_group=None: list_to_gather)
        group = process_group or self.process_group
        gathered = of_ranks(apply_to_collection(lists, Tensor, lambda one: one.detach().cpu()), group)
        for name in lists:
            setattr(self, name, [])  # nothing is left for torchmetrics to gather
        given(self, dist_sync_fn, process_group)
        device = "cpu" if self.compute_on_cpu else self.device
        for name in lists:
            entries = [entry for of_rank in gathered for entry in of_rank[name]]
            whole = apply_to_collection(entries, Tensor, partial(Tensor.to, device=device))
            setattr(self, name, reductions[name](whole) if whole and callable(reductions[name]) else whole)

    patches.replace(Metric, "_sync_dist", _sync_dist)
