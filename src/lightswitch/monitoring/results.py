"""Lightning's collection of what a training loop has logged, made faster to write and to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _METRICS, _ResultCollection, _ResultMetric
from torch import Tensor

from lightswitch.monitoring.logged import Logged


class Results(_ResultCollection):
    """Collection whose values of a step are read once: on a GPU, each reading waits for the device.

    Attributes:
        before: what was logged of this epoch before the run was resumed, by key, until the key is logged again.
    """

    _of_step: _METRICS | None = None
    before: Mapping[str, Logged] = MappingProxyType({})

    @property
    def of_step(self) -> _METRICS:
        """Values that were logged last for a step; callers leave them as they are."""
        if self._of_step is None:
            self._of_step = super().metrics(on_step=True)
        return self._of_step

    def metrics(self, on_step: bool) -> _METRICS:
        if not on_step:
            return super().metrics(on_step)
        kept = self.of_step
        return _METRICS(callback=dict(kept["callback"]), log=dict(kept["log"]), pbar=dict(kept["pbar"]))

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        self._of_step = None
        super().update_metrics(key, value, batch_size)
        if key in self.before:
            self[key].add(self.before[key])
            self.before = {other: part for other, part in self.before.items() if other != key}

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        self._of_step = None
        if metrics is None and fx is None:  # the epoch is over
            self.before = {}
        super().reset(metrics, fx)

    def to(self, *args: Any, **kwargs: Any) -> Results:
        self._of_step = None
        super().to(*args, **kwargs)
        return self

    def logged_by_step(self) -> Iterator[tuple[str, Tensor]]:
        """Return what loggers are to have of a step, by Lightning's key."""
        for key, item in self.valid_items():
            value = item._forward_cache
            if item.meta.on_step and item.meta.logger and isinstance(value, Tensor) and value.numel() == 1:
                yield key, value

    def put_of_step(self, key: str, value: float) -> Tensor:
        """Put another number in the place of what was logged for a step, and return it as it then stands."""
        self._of_step = None
        item = self[key]
        assert isinstance(item, Value)
        return item.put(value)

    def forget_batch(self) -> None:
        """Let go of the batch, from which a value's weight in an epoch's mean was taken."""
        self.batch = self.batch_size = None

    def __setitem__(self, key: str, value: _ResultMetric) -> None:
        super().__setitem__(key, Value(value.meta, value.is_tensor))


class Value(_ResultMetric):
    """Logged value, which is moved only where it lies on another device.

    Lightning moves it at each `self.log`, and walks through all attributes of the metric that it is: most of the call's
    time (Lightning-AI/pytorch-lightning#20388).
    """

    def to(self, *args: Any, **kwargs: Any) -> Value:
        if self.is_tensor and not kwargs and args == (self.value.device,):  # its tensors lie where its value does
            return self
        super().to(*args, **kwargs)
        return self

    def put(self, value: float) -> Tensor:
        """Replace what was logged for a step, and return it as it then stands."""
        self._forward_cache = replaced = torch.full_like(cast(Tensor, self._forward_cache), value)
        return replaced

    def add(self, before: Logged) -> None:
        """Count what was logged before, of the same epoch."""
        value = torch.tensor(before.value, dtype=self.value.dtype, device=self.value.device)
        if self.meta.is_mean_reduction:
            self.cumulated_batch_size = self.cumulated_batch_size + before.samples
        is_sum = self.meta.is_mean_reduction or self.meta.is_sum_reduction
        self.value = self.value + value if is_sum else self.meta.reduce_fx(self.value, value)
