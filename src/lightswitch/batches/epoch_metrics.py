"""What an epoch's metrics have seen before a run was resumed within it: Lightning begins them anew."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_max, dim_zero_min, dim_zero_sum

from lightswitch.batches.position import saved_position
from lightswitch.monitoring.logged import Logged, joined, logged
from lightswitch.monitoring.results import Results

OF_RANKS = "of_ranks"  # of a checkpoint: a list of what each rank adds to it, in numbers, lists and dictionaries
_LARGEST = 10_000  # elements of a metric's state that is saved; it goes through the store where ranks have met
_REDUCED: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dim_zero_sum: torch.add,
    dim_zero_min: torch.minimum,
    dim_zero_max: torch.maximum,
}

State = dict[str, Any]  # of a metric: by the state's name, its values


class EpochMetrics(Callback):
    """Callback that keeps in a checkpoint what was logged of an epoch that is not over, and goes on from that.

    These are the values of `self.log(…, on_epoch=True)`, and the metrics of torchmetrics whose states are sums, minima
    or maxima over samples; those that keep the samples themselves, as a curve's, see the rest of the epoch alone. They
    are of all ranks, and go on at any world size. It follows `GlobalBatch`, which knows where in an epoch the run is.
    """

    def __init__(self) -> None:
        self._of_validation: frozenset[str] = frozenset()  # metrics that had seen nothing when it began
        self._saved: list[dict[str, Any]] = []
        self._resumed: set[str] = set()  # metrics that go on, until the epoch ends

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._of_validation = frozenset(name for name, metric in _metrics(pl_module) if not metric.update_called)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        position = saved_position(checkpoint)
        if position is None or not position.step:  # between two epochs
            return
        results = trainer.fit_loop.epoch_loop._results
        values = {key: Logged.of(item) for key, item in logged(results).items()}
        if isinstance(results, Results):
            values |= results.before
        left_out = self._of_validation if trainer.validating else ()
        states = {
            name: _state(metric)
            for name, metric in _metrics(pl_module)
            if (metric.update_called or name in self._resumed) and name not in left_out and _is_kept(metric)
        }
        if values or states:
            told = {key: asdict(value) for key, value in values.items()}
            checkpoint[OF_RANKS] = [{"logged": told, "metrics": states}]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._saved = checkpoint.get(OF_RANKS, [])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        saved, self._saved = self._saved, []
        if not saved or not trainer.is_global_zero:  # what ranks have seen is added up where it is asked for
            return
        results = trainer.fit_loop.epoch_loop._results
        if isinstance(results, Results):
            results.before = joined([{key: Logged(**one) for key, one in of["logged"].items()} for of in saved])
        for name, metric in _metrics(pl_module):
            states = [of["metrics"][name] for of in saved if name in of["metrics"]]
            if states and _is_kept(metric) and set(states[0]) == set(metric._defaults):
                metric.load_state_dict(_whole(metric, states), strict=False)
                self._resumed.add(name)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._resumed.clear()  # not called where a run goes on within an epoch


def _metrics(module: LightningModule) -> Iterator[tuple[str, Metric]]:
    for part in module.modules():
        if isinstance(part, MetricCollection):
            part.values()  # of several that count the same, one counts: the others learn of it when they are asked for
    return ((name, part) for name, part in module.named_modules() if isinstance(part, Metric))


def _is_kept(metric: Metric) -> bool:
    """Return whether a metric's states can be added up; those that are saved with the module's weights are not."""
    are_added = all(
        isinstance(default, Tensor) and metric._reductions[name] in _REDUCED and not metric._persistent[name]
        for name, default in metric._defaults.items()
    )
    return are_added and 0 < sum(getattr(metric, name).numel() for name in metric._defaults) <= _LARGEST


def _state(metric: Metric) -> State:
    return {name: getattr(metric, name).tolist() for name in metric._defaults}


def _whole(metric: Metric, states: Iterable[State]) -> Mapping[str, Tensor]:
    """Return the states of all ranks together."""
    whole: dict[str, Tensor] = {}
    for name, values in itertools.chain.from_iterable(state.items() for state in states):
        own = getattr(metric, name)
        part = torch.tensor(values, dtype=own.dtype, device=own.device)
        whole[name] = _REDUCED[metric._reductions[name]](whole[name], part) if name in whole else part
    return whole
