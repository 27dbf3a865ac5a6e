"""What ranks log of an epoch or an evaluation, brought together where it ends, also where a run was resumed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_max, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers.abstract import WrapperMetric

from lightswitch import patches
from lightswitch.batches.position import Position, saved_position
from lightswitch.hooked_strategy import HookedStrategy
from lightswitch.monitoring.step_results import Logged, Results, joined, logged

OF_RANKS = "of_ranks"  # of a checkpoint: a list of what each rank adds to it, in numbers, lists and dictionaries
_LARGEST = 10_000  # elements of a metric's state that is saved; it goes through the store where ranks have met
_REDUCED: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dim_zero_sum: torch.add,
    dim_zero_min: torch.minimum,
    dim_zero_max: torch.maximum,
}

State = dict[str, Any]  # of a metric: by the state's name, its values


class LogsOfRanks:
    """Values that the ranks of a Trainer log, brought together at the moments that all of them reach.

    These are the end of an epoch's or an evaluation's last batch, before hooks are called, and the end of those hooks.

    Args:
        share: of the ranks that read other samples than those before them: ranks of tensor parallelism read the same.
    """

    def __init__(self, trainer: Trainer, share: float) -> None:
        self._trainer = trainer
        self._share = share
        self._joined: dict[str, Tensor] = {}  # by Lightning's key, the value of all ranks, until another is logged

    def install(self) -> None:
        """Bring together from now on."""
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
        """Leave what is logged to Lightning again."""
        patches.restore(self._trainer._logger_connector, "epoch_end_reached")
        patches.restore(self._trainer._logger_connector, "on_epoch_end")

    def _join(self) -> None:
        """Give each rank the values of all ranks, also of what it has not logged itself. Collective."""
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
    """Return whether the user has asked Lightning to bring a value together, or for that of rank 0 alone."""
    return bool(item.meta.sync.should or item.meta.sync.rank_zero_only)


def _update(whole: Logged, like: Tensor, share: float) -> tuple[Tensor, float]:
    """Return the value and the batch size that leave an empty item of Lightning's with what all ranks have logged."""
    value = whole.value
    if whole.reduce_fx == "mean":
        value = value / whole.samples if whole.samples else float("nan")
    elif whole.reduce_fx == "sum":
        value *= share
    return torch.tensor(value, dtype=like.dtype, device=like.device), whole.samples


class EpochMetrics(Callback):
    """Callback that keeps in a checkpoint what was logged of an epoch that is not over, and goes on from that.

    These are the values of `self.log(…, on_epoch=True)`, and the metrics of torchmetrics whose states are sums, minima
    or maxima over samples; those that keep the samples themselves, as a curve's, see the rest of the epoch alone. They
    are of all ranks, and go on at any world size. What an epoch's end does not reset, as the best value so far, goes on
    from there as well. It follows `GlobalBatch`, which knows where in an epoch the run is.
    """

    def __init__(self) -> None:
        self._of_validation: frozenset[str] = frozenset()  # metrics that had seen nothing when it began
        self._saved: list[dict[str, Any]] = []
        self._resumed: set[str] = set()  # metrics that go on

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
        told = {key: asdict(value) for key, value in values.items()} if position.step else {}
        anew = self._of_validation if trainer.validating and position.validation_due else frozenset()
        over = _over(trainer, position)
        states = {
            name: _state(metric)
            for name, metric in _metrics(pl_module)
            if metric.update_called and _is_kept(metric) and name not in anew and id(metric) not in over
        }
        if told or states:
            checkpoint[OF_RANKS] = [{"logged": told, "metrics": states}]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore metrics, before a validation that was due; in an evaluation those alone that are saved as weights."""
        saved, is_fit = checkpoint.get(OF_RANKS, []), trainer.state.fn == TrainerFn.FITTING
        self._saved, self._resumed = saved if is_fit else [], set()
        for name, metric in _metrics(pl_module):
            states = [of["metrics"][name] for of in saved if name in of["metrics"]]
            is_wanted = _is_kept(metric) and (is_fit or any(metric._persistent.values()))
            if states and is_wanted and set(states[0]) == set(metric._defaults):
                # what ranks have seen is added up where it is asked for
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
        """Restore what the module's own `on_train_start` has reset: many do, to forget the check before training."""
        for name, metric in self._going_on(module):
            if name in kept and not metric.update_called:
                _restore(metric, _whole(metric, [kept[name]]))

    def _going_on(self, module: LightningModule) -> Iterator[tuple[str, Metric]]:
        return ((name, metric) for name, metric in _metrics(module) if name in self._resumed)


def _over(trainer: Trainer, position: Position) -> set[int]:
    """Return the metrics, by identity, that were logged in an epoch or validation that is over: Lightning resets them
    once all hooks have run."""
    loop = trainer.fit_loop.epoch_loop
    ended = [] if position.step else [loop._results]
    ended += [loop.val_loop._results] if trainer.validating else []
    return {id(item.value) for results in ended for item in results.values() if not item.is_tensor}


def _metrics(module: LightningModule) -> Iterator[tuple[str, Metric]]:
    for part in module.modules():
        if isinstance(part, MetricCollection):
            part.values()  # of several that count the same, one counts: the others learn of it when they are asked for
    return ((name, part) for name, part in module.named_modules() if isinstance(part, Metric))


def _is_kept(metric: Metric) -> bool:
    """Return whether a metric's states can be added up, and are all of it, which those of a wrapper are not."""
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
    """Return the states of all ranks together."""
    whole: dict[str, Tensor] = {}
    for name, values in itertools.chain.from_iterable(state.items() for state in states):
        own = getattr(metric, name)
        part = torch.tensor(values, dtype=own.dtype, device=own.device)
        whole[name] = _REDUCED[metric._reductions[name]](whole[name], part) if name in whole else part
    return whole
