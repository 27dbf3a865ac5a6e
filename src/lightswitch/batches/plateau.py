"""What ReduceLROnPlateau goes by, over a resume."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import LRSchedulerConfig

from lightswitch.batches.position import Position, saved_position

_KEY = "plateau"  # of a checkpoint


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
        checkpoint[_KEY] = {"due": [index for index, config in plateaus.items() if _is_due(config, trainer, position)]}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._due = checkpoint.get(_KEY, {}).get("due", [])

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
