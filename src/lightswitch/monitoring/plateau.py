"""Validation for schedules that go by it."""

from __future__ import annotations

import logging

from lightning.pytorch import Callback, LightningModule, Trainer

from lightswitch import patches

log = logging.getLogger(__name__)


class PlateauValidation(Callback):
    """Callback that validates at the end of each epoch where ReduceLROnPlateau waits for it there.

    Lightning asks for the schedule's metric at each epoch's end; validations counted in steps may not have begun by
    then, and it fails. For runs whose interval is a default that nobody typed.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        waits = any(config.reduce_on_plateau and config.interval == "epoch" for config in trainer.lr_scheduler_configs)
        if waits and trainer.check_val_every_n_epoch is None:
            patches.replace(trainer, "check_val_every_n_epoch", 1)
            patches.replace(trainer, "val_check_batch", trainer.num_training_batches)
            if trainer.is_global_zero:
                log.info("validates  once an epoch, as ReduceLROnPlateau goes by it")
