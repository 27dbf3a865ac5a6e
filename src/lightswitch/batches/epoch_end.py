"""The end of an epoch that was cut off, after its last step, and comes in the run that goes on."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightswitch import patches
from lightswitch.batches.position import saved_position

log = logging.getLogger(__name__)

_KEY = "epoch_end"  # of a checkpoint


class EpochEnd(Callback):
    """Callback that keeps in a checkpoint what an epoch's end goes by, where that is still due.

    A checkpoint of an epoch's last step is written before the epoch's validation and end. Early stopping, for one, goes
    by metrics then, which Lightning does not save. What the module itself has gathered over the epoch, in a list for
    one, is gone with its process: if its `on_train_epoch_end` fails for that, the run goes on without it. It follows
    `GlobalBatch`, which runs the validation that was due.
    """

    def __init__(self) -> None:
        self._metrics: dict[str, float] | None = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        position = saved_position(checkpoint)
        if position is not None and position.epoch_end_due:
            checkpoint[_KEY] = {name: value.item() for name, value in trainer.callback_metrics.items()}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._metrics = checkpoint.get(_KEY)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._metrics is None:
            return
        known, metrics = trainer._logger_connector._callback_metrics, self._metrics
        known.update({name: torch.tensor(value) for name, value in metrics.items() if name not in known})
        patches.replace(pl_module, "on_train_epoch_end", _lenient(pl_module.on_train_epoch_end, trainer.current_epoch))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._metrics is not None:
            self._metrics = None
            patches.restore(pl_module, "on_train_epoch_end")


def _lenient(end: Callable[[], None], epoch: int) -> Callable[[], None]:
    @functools.wraps(end)  # whose module tells whether it is the user's own
    def attempt() -> None:
        try:
            end()
        except Exception as error:
            log.warning(
                "epoch %d was cut off before its end: on_train_epoch_end fails without what it had gathered (%s: %s); "
                "the run goes on without it", epoch, type(error).__name__, error,
            )  # fmt: skip

    return attempt
