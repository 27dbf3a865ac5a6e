"""Metrics that a module logs: when to log them, and Lightning's result collection, made faster and restorable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _METRICS, _ResultCollection, _ResultMetric
from torch import Tensor
from torchmetrics import Metric

_NEUTRAL = {"mean": 0.0, "sum": 0.0, "min": float("inf"), "max": float("-inf")}


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
        before: values logged in this epoch before the run was resumed, by key; removed once the key is logged again.
        of_batch: this rank's own scalars that a batch has logged so far, by key, if they go to loggers at each step.
    """

    _of_step: _METRICS | None = None
    before: Mapping[str, Logged] = MappingProxyType({})
    _is_naming = False
    _named: frozenset[str] = frozenset()  # keys that this process has not logged itself

    def __init__(self, training: bool) -> None:
        super().__init__(training)
        self.of_batch: dict[str, Tensor] = {}

    @property
    def of_step(self) -> _METRICS:
        """Values last logged for a step; callers must not modify them."""
        if self._of_step is None:
            self._of_step = super().metrics(on_step=True)
        return self._of_step

    def metrics(self, on_step: bool) -> _METRICS:
        if not on_step:
            return super().metrics(on_step)
        last = self.of_step
        return _METRICS(callback=dict(last["callback"]), log=dict(last["log"]), pbar=dict(last["pbar"]))

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Log a value as Lightning does, and keep this rank's own for `of_batch`, which `sync_dist` would average."""
        self._of_step = None
        item = self[key]
        if self._is_naming and isinstance(item, Value) and item.is_tensor:
            item.name(value)
        else:
            super().update_metrics(key, value, batch_size)
        own = value.clone() if item.is_tensor and item.meta.sync.should else item._forward_cache
        if item.meta.on_step and item.meta.logger and isinstance(own, Tensor) and own.numel() == 1:
            self.of_batch[key] = own.detach()
        if key in self.before:
            if self[key].is_tensor:  # a metric has its state restored by itself
                self[key].add(self.before[key])
            self.before = {other: part for other, part in self.before.items() if other != key}

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        self._of_step = None
        super().reset(metrics, fx)
        if metrics is None and fx is None:  # the epoch is over
            self.before = {}
            for key in self._named:
                del self[key]
            self._named = frozenset()

    def log_before(self, trainer: Trainer) -> None:
        """Log, at an epoch's end, what was logged in it before the run was resumed, and not since."""
        for earlier in tuple(self.before.values()):
            earlier.log_name(self, trainer)

    def count(self, samples: int) -> None:
        """Weight what the current batch logs by its number of samples, which Lightning would guess."""
        self.batch_size = samples

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Context in which this rank logs names, with neutral values, that other ranks may not log now.

        With `sync_dist` and `on_step`, Lightning averages a value over the ranks as soon as it is logged.
        """
        self._is_naming = True
        yield
        self._is_naming = False

    def forget_after_epoch(self, key: str) -> None:
        """Forget a name with the epoch: in the next one, the process may log it itself, with other arguments."""
        self._named |= {key}

    def to(self, *args: Any, **kwargs: Any) -> Results:
        self._of_step = None
        super().to(*args, **kwargs)
        return self

    def put_of_step(self, key: str, value: float) -> None:
        """Replace the value logged for a step."""
        self._of_step = None
        item = self[key]
        assert isinstance(item, Value)
        item.put(value)

    def __setitem__(self, key: str, value: _ResultMetric) -> None:
        super().__setitem__(key, Value(value.meta, value.is_tensor))


class Value(_ResultMetric):
    """Logged value that is moved to a device only if it is on another one.

    Lightning moves it at each `self.log`, which goes through all attributes of this torchmetrics metric and takes most
    of the call's time (Lightning-AI/pytorch-lightning#20388).
    """

    def to(self, *args: Any, **kwargs: Any) -> Value:
        if self.is_tensor and not kwargs and args == (self.value.device,):  # all its tensors are on that device
            return self
        super().to(*args, **kwargs)
        return self

    def name(self, neutral: Tensor) -> None:
        """Count as logged, with a neutral value, which is not reduced over ranks."""
        self.has_reset, self._forward_cache = False, neutral
        self._update_count, self._computed = 1, None  # as by `update`

    def put(self, value: float) -> None:
        """Replace the value logged for a step."""
        like = torch.zeros((), device=self.value.device) if self._forward_cache is None else self._forward_cache
        self._forward_cache = torch.full_like(like, value)

    def add(self, before: Logged) -> None:
        """Combine this value with one logged earlier in the same epoch."""
        value = torch.tensor(before.value, dtype=self.value.dtype, device=self.value.device)
        if self.meta.is_mean_reduction:
            self.cumulated_batch_size = self.cumulated_batch_size + before.samples
        is_sum = self.meta.is_mean_reduction or self.meta.is_sum_reduction
        self.value = self.value + value if is_sum else self.meta.reduce_fx(self.value, value)


@dataclass(frozen=True)
class Logged:
    """Value logged under one name in an epoch so far, by one rank or all ranks, with `self.log(…, on_epoch=True)`.

    Attributes:
        reduce_fx: mean, sum, min or max.
        value: the logged values reduced by ``reduce_fx``; for a mean, their sum over samples.
        samples: number of samples of a mean.
        metric_attribute: name of the module's metric that was logged, which holds the value itself; None for a number.
    """

    fx: str
    name: str
    prog_bar: bool
    logger: bool
    on_step: bool
    enable_graph: bool
    add_dataloader_idx: bool
    reduce_fx: str
    value: float
    samples: float
    metric_attribute: str | None = None
    sync_dist: bool = False
    rank_zero_only: bool = False
    on_epoch: bool = True

    @classmethod
    def of(cls, item: _ResultMetric) -> Logged:
        """Create the record of a value that Lightning has collected under one name."""
        meta = item.meta
        suffix = "" if meta.dataloader_idx is None else f".{meta.dataloader_idx}"
        return cls(
            fx=meta.fx.removesuffix(suffix),
            name=meta.name,
            prog_bar=meta.prog_bar,
            logger=meta.logger,
            on_step=meta.on_step,
            enable_graph=meta.enable_graph,
            add_dataloader_idx=meta.add_dataloader_idx,
            reduce_fx=meta.reduce_fx.__name__,
            value=item.value.item() if item.is_tensor else _NEUTRAL[meta.reduce_fx.__name__],
            samples=item.cumulated_batch_size.item() if item.is_tensor and meta.is_mean_reduction else 1,
            metric_attribute=None if item.is_tensor else meta.metric_attribute,
            sync_dist=meta.sync.should,
            rank_zero_only=meta.sync.rank_zero_only,
            on_epoch=meta.on_epoch,
        )

    def joined(self, other: Logged) -> Logged:
        """Return both values combined by `reduce_fx`."""
        if self.reduce_fx in ("min", "max"):
            return replace(self, value=(min if self.reduce_fx == "min" else max)(self.value, other.value))
        return replace(self, value=self.value + other.value, samples=self.samples + other.samples)

    def log_name(self, results: _ResultCollection, trainer: Trainer) -> None:
        """Log the name with a neutral value, or the metric: Lightning then knows what this process has not logged."""
        arguments = {key: value for key, value in asdict(self).items() if key not in ("value", "samples", "reduce_fx")}
        strategy, metric = trainer.strategy, self.metric_attribute
        neutral = torch.tensor(_NEUTRAL[self.reduce_fx], device=strategy.root_device)
        with results.naming() if isinstance(results, Results) else nullcontext():
            results.log(
                value=neutral if metric is None else cast(Metric, trainer.lightning_module.get_submodule(metric)),
                reduce_fx=getattr(torch, self.reduce_fx),
                sync_dist_fn=strategy.reduce,
                batch_size=0,
                **arguments,
            )
        if isinstance(results, Results):
            results.forget_after_epoch(f"{self.fx}.{self.name}")


def logged(results: _ResultCollection) -> dict[str, _ResultMetric]:
    """Return this rank's logged values of the epoch or evaluation, by Lightning's key, without torchmetrics."""
    return {key: item for key, item in results.valid_items() if item.is_tensor and item.meta.on_epoch}


def joined(of_ranks: Sequence[Mapping[str, Logged]]) -> dict[str, Logged]:
    """Return the combined values of all ranks, by key; the keys are in the order of the first rank with each key."""
    whole: dict[str, Logged] = {}
    for parts in of_ranks:
        for key, part in parts.items():
            whole[key] = whole[key].joined(part) if key in whole else part
    return whole
