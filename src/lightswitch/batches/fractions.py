"""Fractions of an epoch, as the Trainer takes them, in whole steps."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightswitch import patches
from lightswitch.batches.combined import Combined
from lightswitch.batches.plan import BatchPlan


class Fractions:
    """Fractions that a Trainer was given as `limit_train_batches`, `overfit_batches` or `val_check_interval`.

    Lightning takes them of micro batches, so that a run would depend on how its steps are cut.
    """

    def __init__(self, plan: BatchPlan) -> None:
        self._plan = plan
        self._limit: float | int | None = None
        self._interval: float | int | None = None

    def note(self, trainer: Trainer) -> None:
        """Take the fractions of a Trainer that begins to fit."""
        self._limit, self._interval = trainer.limit_train_batches, trainer.val_check_interval

    def round(self, trainer: Trainer, loaders: Combined) -> None:
        """Let the Trainer count micro batches of whole steps, of a single loader whose length is known."""
        if not (loaders.is_single and loaders.slices and loaders.is_sized):
            return
        steps, accumulation = loaders.slices[0].steps, self._plan.accumulation
        if isinstance(self._limit, float) and self._limit < 1.0:
            steps = int(steps * self._limit)
            patches.replace(trainer, "limit_train_batches", steps * accumulation)
        elif isinstance(self._limit, int):
            steps = min(steps, self._limit // accumulation)
        if isinstance(self._interval, float) and self._interval < 1.0:
            patches.replace(trainer, "val_check_interval", max(1, int(steps * self._interval)) * accumulation)
