"""The samples of an optimizer step, as they were told to what shows its speed."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.data import extract_batch_size

from lightswitch.batches.plan import BatchPlan
from lightswitch.lightning_types import callbacks_of
from lightswitch.monitoring.progress import Progress
from lightswitch.monitoring.throughput import Throughput

log = logging.getLogger(__name__)


class ToldSamples:
    """Number of samples of an optimizer step, over all devices, that throughput and progress were told last.

    Args:
        plan: of the run, by which they were made.
    """

    def __init__(self, plan: BatchPlan) -> None:
        self._plan = plan
        self._samples = plan.global_batch
        self._is_counted = False

    def tell(self, trainer: Trainer, samples: int) -> bool:
        """Tell another number of samples; return whether it is another."""
        if samples == self._samples:
            return False
        self._samples = samples
        for callback in callbacks_of(trainer):
            if isinstance(callback, Throughput | Progress):
                callback.count(samples)
        return True

    def count(self, trainer: Trainer, batch: Any) -> None:
        """Count the samples of the first micro batch of a loader whose batches are its own, and tell a step's."""
        if self._is_counted:
            return
        self._is_counted = True
        try:
            micro = extract_batch_size(batch)
        except MisconfigurationException:  # a batch without tensors
            return
        own = micro * self._plan.slices
        if micro and self.tell(trainer, own) and trainer.global_rank == 0:
            log.info(
                "batch      %s, as the data loader makes them", replace(self._plan, global_batch=own, micro_batch=micro)
            )
