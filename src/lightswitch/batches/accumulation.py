"""The micro batches of an optimizer step: what can step by them, their samples, and the mean over them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torch.optim import Optimizer

from lightswitch.batches.combined import Combined
from lightswitch.batches.plan import BatchPlan
from lightswitch.errors import Refused
from lightswitch.hooked_strategy import goes_by_loss
from lightswitch.lightning_types import callbacks_of
from lightswitch.monitoring.progress import Progress
from lightswitch.monitoring.throughput import Throughput

log = logging.getLogger(__name__)


def check_optimizers(optimizers: Iterable[Optimizer], plan: BatchPlan) -> None:
    """Check that optimizers can step by several micro batches, where the plan has several in a step.

    Raises:
        Refused: one of them evaluates the loss itself.
    """
    for optimizer in optimizers:
        if plan.accumulation > 1 and goes_by_loss(optimizer):
            raise Refused(
                f"{type(optimizer).__name__} evaluates the loss several times a step, which of several micro batches "
                "would be that of the last one alone; leave micro_batch_size out, or type "
                f"global_batch_size={plan.micro_batch * plan.replicas} for steps of one"
            )


class StepLoss:
    """Sum of a step's losses so far, each weighted by the share of its micro batch; on this rank."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, outputs: Any, weight: float | Tensor) -> None:
        """Add what `training_step` has returned for a micro batch; nothing where there is no loss in it."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if isinstance(loss, Tensor):  # Lightning has divided it by the accumulation
            share = loss.detach() * weight
            self._sum = share if self._sum is None else self._sum + share

    def take(self) -> Tensor | None:
        """Return the sum, and begin another step; None where there was no loss."""
        taken, self._sum = self._sum, None
        return taken


def weight(loaders: Combined, plan: BatchPlan, micro_batch: int) -> float:
    """Return the weight of a micro batch's mean in the mean over its optimizer step; 1.0 for an even cut.

    Args:
        micro_batch: of the epoch, from 0.
    """
    if not (loaders.slices and loaders.is_single):  # of several loaders, each is cut evenly
        return 1.0
    return loaders.slices[0].weight(*divmod(micro_batch, plan.accumulation))


class CountedSamples:
    """Samples of an optimizer step, counted once from the first micro batch where loaders cut the batch themselves.

    Args:
        plan: of the run, which throughput and progress go by until then.
    """

    def __init__(self, plan: BatchPlan) -> None:
        self._plan = plan
        self._is_counted = False

    def count(self, trainer: Trainer, batch: Any) -> None:
        """Count the samples of the first micro batch, and hand a step's to throughput and progress."""
        if self._is_counted:
            return
        self._is_counted = True
        try:
            micro = extract_batch_size(batch)
        except MisconfigurationException:  # a batch without tensors
            return
        samples = micro * self._plan.slices
        if not micro or samples == self._plan.global_batch:
            return
        for callback in callbacks_of(trainer):
            if isinstance(callback, Throughput | Progress):
                callback.count(samples)
        if trainer.global_rank == 0:
            cut = replace(self._plan, global_batch=samples, micro_batch=micro)
            log.info("batch      %s, as the data loader makes them", cut)
