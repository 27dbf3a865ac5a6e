"""Metrics that a module logs: when to log them, and Lightning's result collection, made faster."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _METRICS, _ResultCollection, _ResultMetric
from torch import Tensor


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
        of_step: values of the last step, as they were read; None if others have been logged since.
        of_batch: this rank's scalars that a batch has logged so far, by key, if they go to loggers at each step.
    """

    of_step: _METRICS | None = None

    def __init__(self, training: bool) -> None:
        super().__init__(training)
        self.of_batch: dict[str, Tensor] = {}

    def start_epoch(self) -> None:
        """Read the values of a step anew: an epoch's end has reset them."""
        self.of_step = None

    def start_batch(self, batch: Any) -> None:
        """Forget what the batch before has logged, and hold this one; None to hold none, as one may be large."""
        self.of_batch = {}
        self.batch, self.batch_size = batch, None

    def count(self, samples: int) -> None:
        """Weight what the current batch logs by its number of samples, which Lightning would guess."""
        self.batch_size = samples

    def metrics(self, on_step: bool) -> _METRICS:
        if not on_step:
            return super().metrics(on_step)
        last = self.of_step = self.of_step or super().metrics(on_step=True)
        return _METRICS(callback=dict(last["callback"]), log=dict(last["log"]), pbar=dict(last["pbar"]))

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        self.of_step = None
        super().update_metrics(key, value, batch_size)
        item = self[key]
        own = item._forward_cache
        if item.meta.on_step and item.meta.logger and isinstance(own, Tensor) and own.numel() == 1:
            self.of_batch[key] = own.detach()

    def put_of_step(self, key: str, value: float) -> None:
        """Replace the value logged for a step."""
        self.of_step = None
        own = self[key]._forward_cache
        assert isinstance(own, Tensor)
        self[key]._forward_cache = torch.full_like(own, value)

    def __setitem__(self, key: str, value: _ResultMetric) -> None:
        super().__setitem__(key, Value(value.meta, value.is_tensor))


class Value(_ResultMetric):
    """Logged value that is moved to a device only if it is on another one, and reduced over ranks by the engine.

    Lightning moves it at each `self.log`, which goes through all attributes of this torchmetrics metric and takes most
    of the call's time (Lightning-AI/pytorch-lightning#20388).
    """

    def to(self, *args: Any, **kwargs: Any) -> Value:
        if self.is_tensor and not kwargs and args == (self.value.device,):  # all its tensors are on that device
            return self
        super().to(*args, **kwargs)
        return self

    def update(self, value: Any, batch_size: int) -> None:
        """Log this rank's own value: with `sync_dist`, Lightning would wait for all ranks at each `self.log`."""
        if not self.meta.sync.should or self.meta.sync.group is not None:
            super().update(value, batch_size)
            return
        self.meta.sync.should = False
        super().update(value, batch_size)
        self.meta.sync.should = True
