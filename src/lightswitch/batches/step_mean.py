"""The mean over the samples of an optimizer step, which takes several micro batches on several ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightswitch.batches.combined import Combined
from lightswitch.batches.plan import BatchPlan


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


def weight(loaders: Combined, plan: BatchPlan, micro_batch: int, batches_a_step: int) -> float:
    """Return the weight of a micro batch's mean in the mean over its optimizer step; 1.0 for an even cut.

    Args:
        micro_batch: of the epoch, from 0.
        batches_a_step: global batches that an optimizer step takes.
    """
    if not (loaders.slices and loaders.is_single):  # of several loaders, each is cut evenly
        return 1.0
    slices = loaders.slices[0]
    batch, micro = divmod(micro_batch, plan.accumulation)
    of_batch = slices.weight(batch, micro)
    if batches_a_step == 1:
        return of_batch
    first = batch // batches_a_step * batches_a_step
    samples = [slices.step_samples(one) for one in range(first, min(first + batches_a_step, slices.steps))]
    return of_batch * samples[batch - first] * batches_a_step / sum(samples)
