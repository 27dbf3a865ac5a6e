"""Accumulation by schedule: Lightning's GradientAccumulationScheduler, which counts global batches here."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler


class Accumulation:
    """Number of global batches that an optimizer step takes in each epoch: one, or as many as a scheduler says.

    The batches are the same either way, and so is their order; optimizer steps are fewer and larger.

    Args:
        callbacks: of the Trainer; the first GradientAccumulationScheduler of them counts.
    """

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        found = (callback for callback in callbacks if isinstance(callback, GradientAccumulationScheduler))
        self._scheduler = next(found, None)

    @property
    def is_scheduled(self) -> bool:
        """Whether there is a scheduler."""
        return self._scheduler is not None

    def batches_a_step(self, epoch: int) -> int:
        """Return how many global batches an optimizer step takes in an epoch."""
        return self._scheduler.get_accumulate_grad_batches(epoch) if self._scheduler else 1

    def steps(self, epochs: int, batches: int) -> int:
        """Return the optimizer steps of so many epochs, each of so many global batches."""
        return sum(math.ceil(batches / self.batches_a_step(epoch)) for epoch in range(epochs))
