"""What the end of an epoch and of a run go by, over a resume: the metrics that were logged last."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightswitch import patches

log = logging.getLogger(__name__)

_KEY = "metrics"  # of a checkpoint


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
