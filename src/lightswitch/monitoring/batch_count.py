"""Batches and optimizer steps, which a module that optimizes by hand takes as many of in a batch as it likes."""

from __future__ import annotations

import logging

from lightning.pytorch import Callback, LightningModule, Trainer

log = logging.getLogger(__name__)


def batches(trainer: Trainer) -> int:
    """Return the number of batches so far, this one included; of optimizer steps, under automatic optimization."""
    if trainer.lightning_module.automatic_optimization:
        return trainer.global_step
    return trainer.fit_loop.total_batch_idx + 1  # by hand, a batch is never cut into micro batches


def is_counted(trainer: Trainer) -> bool:
    """Return whether this batch of training is logged by the interval alone, on all ranks alike."""
    every_n_steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set past Lightning's declaration
    if every_n_steps == 0:  # which means never
        return False
    return (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % every_n_steps == 0


def is_logged(trainer: Trainer) -> bool:
    """Return whether loggers are due at this batch of training, which may be the last one.

    Lightning's own answer, `should_update_logs`, first finds out which of its loops is the one that runs.
    """
    return is_counted(trainer) or (trainer.should_stop and trainer.log_every_n_steps > 0)  # type: ignore[attr-defined]  # likewise


class StepsByHand(Callback):
    """Callback that says what is counted in batches and what in optimizer steps, where a module optimizes by hand."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.automatic_optimization or not trainer.is_global_zero:
            return
        optimizers = f"{len(trainer.optimizers)} optimizer{'s' if len(trainer.optimizers) != 1 else ''}"
        log.info(
            "by hand    %s has %s: trainer.max_steps and step_N.ckpt count the steps of all; "
            "trainer.val_check_interval, trainer.log_every_n_steps and metrics.csv count batches",
            type(pl_module).__name__, optimizers,
        )  # fmt: skip


class StepsAreCounted(Callback):
    """Callback that says after the first epoch, and not at the run's end, that batches were seen and no step counted.

    Checkpoints, schedules and the limits of a run follow the count of optimizer steps.
    """

    def __init__(self) -> None:
        self._first_step: int | None = None  # None once the first epoch is over

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_step = trainer.global_step

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        first, self._first_step = self._first_step, None
        batches = trainer.fit_loop.epoch_loop.batch_idx + 1
        if first != trainer.global_step or batches < 1 or not trainer.is_global_zero:
            return
        log.warning(
            "no step    an epoch of %d batches, and no optimizer step was counted, so nothing is saved and "
            "trainer.max_steps is never reached: step what self.optimizers() returns, not an optimizer inside of it, "
            "and return a loss from training_step",
            batches,
        )
