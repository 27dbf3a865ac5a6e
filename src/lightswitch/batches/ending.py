"""What the end of an epoch, of a run, and ReduceLROnPlateau go by, over a resume: metrics that were logged."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import LRSchedulerConfig

from lightswitch import patches
from lightswitch.batches.position import Position, saved_position

log = logging.getLogger(__name__)

_KEY = "metrics"  # of a checkpoint
_PLATEAU_KEY = "plateau"  # of a checkpoint


class Ending(Callback):
    """Callback that keeps the Trainer's `callback_metrics` in checkpoints.

    Early stopping, schedules and results.json go by them, and Lightning saves none. What the module itself has gathered
    over an epoch, in a list for one, is gone with its process: where a run is resumed after an epoch's last batch, and
    the module's `on_train_epoch_end` fails for that, the run goes on without it. It precedes `GlobalBatch`, which runs
    the validation that was due.
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

    @functools.wraps(end)  # whose module tells whether it is the user's own
    def attempt() -> None:
        try:
            end()
        except Exception as error:
            if progress.total.ready != begun_before:  # the module has seen batches of the epoch
                raise
            log.warning(
                "epoch %d was cut off before its end: on_train_epoch_end fails without what it had gathered (%s: %s); "
                "the run goes on without it", epoch, type(error).__name__, error,
            )  # fmt: skip

    return attempt


class PlateauState(Callback):
    """Callback that keeps in checkpoints which steps of ReduceLROnPlateau were due.

    A checkpoint of a batch is written before the validation and the schedule's step that follow it. It follows
    `GlobalBatch`, which runs the validation that was due.
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
        """Take the steps that were due, by the metrics of the validation that was due, or else by those saved."""
        for index, config in _plateaus(trainer).items():
            metric = trainer.callback_metrics.get(str(config.monitor))
            if index in self._due and metric is not None:
                call._call_lightning_module_hook(trainer, "lr_scheduler_step", config.scheduler, metric)
        self._due = []


def _plateaus(trainer: Trainer) -> dict[int, LRSchedulerConfig]:
    """Return the schedules that step by a metric, by their index among all; Lightning steps none of manual modules."""
    if not trainer.lightning_module.automatic_optimization:
        return {}
    return {index: config for index, config in enumerate(trainer.lr_scheduler_configs) if config.reduce_on_plateau}


def _is_due(config: LRSchedulerConfig, trainer: Trainer, position: Position) -> bool:
    """Return whether a schedule steps after the batch or the epoch that has just ended, and has not yet."""
    loop = trainer.fit_loop
    if config.interval == "epoch":
        is_ahead, count = loop.epoch_progress.current.completed < position.epoch, trainer.current_epoch + 1
    else:
        is_ahead, count = loop.epoch_loop._batches_that_stepped < position.steps, loop.epoch_loop.batch_idx + 1
    return is_ahead and count % config.frequency == 0
