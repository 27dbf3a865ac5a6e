"""The micro batches of an optimizer step: how many there are, their samples, and the mean over them."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from lightswitch import patches
from lightswitch.batches.combined import Combined
from lightswitch.batches.order import TrainingSlices
from lightswitch.batches.plan import BatchPlan
from lightswitch.errors import Refused
from lightswitch.hooked_strategy import goes_by_loss
from lightswitch.lightning_types import callbacks_of
from lightswitch.mixins import Mixin, with_mixin
from lightswitch.monitoring.progress import Progress
from lightswitch.monitoring.throughput import Throughput

log = logging.getLogger(__name__)


class Accumulation:
    """Number of global batches that an optimizer step takes in each epoch: one, or as many as a scheduler says.

    The batches are the same either way, and so is their order; optimizer steps are fewer and larger.
    """

    def __init__(self, plan: BatchPlan) -> None:
        self._plan = plan
        self._scheduler: GradientAccumulationScheduler | None = None
        self.batches_a_step = 1  # in the epoch that was started last

    def follow(self, callbacks: list[Callback]) -> None:
        """Follow the first GradientAccumulationScheduler of a Trainer's callbacks, which lose Lightning's check."""
        self._scheduler = None
        for index, callback in enumerate(callbacks):
            if isinstance(callback, GradientAccumulationScheduler):
                callbacks[index] = served = with_mixin(_Served, callback)
                self._scheduler = self._scheduler or served

    @property
    def is_scheduled(self) -> bool:
        """Whether there is a scheduler."""
        return self._scheduler is not None

    @property
    def micro_batches(self) -> int:
        """Micro batches of an optimizer step, on each device."""
        return self._plan.accumulation * self.batches_a_step

    def check(self, trainer: Trainer, loaders: Combined) -> None:
        """Check that the last step of an epoch is known before it is read, as steps take several batches, and that the
        optimizer can step by several.

        Raises:
            Refused: a stream, several loaders, or one that runs as it is; an optimizer that evaluates the loss itself.
        """
        for optimizer in trainer.optimizers:
            if (self.is_scheduled or self._plan.accumulation > 1) and goes_by_loss(optimizer):
                raise Refused(
                    f"{type(optimizer).__name__} evaluates the loss several times a step, which of several micro "
                    "batches would be that of the last one alone; leave micro_batch_size and "
                    "GradientAccumulationScheduler out, or type "
                    f"global_batch_size={self._plan.micro_batch * self._plan.replicas} for steps of one"
                )
        known = loaders.is_single and any(type(slices) is TrainingSlices for slices in loaders.slices)
        if self.is_scheduled and not known:
            raise Refused(
                "GradientAccumulationScheduler: how many samples the last step of an epoch has is known of a single "
                "data loader over samples with indices alone; leave it out, and type global_batch_size=N"
            )

    def bound_steps(self, trainer: Trainer, loaders: Combined) -> None:
        """Let the Trainer know how many optimizer steps its epochs have, which a schedule may ask it for.

        It counts them by the accumulation of the moment.
        """
        epochs, limit, loop = trainer.max_epochs, trainer.limit_train_batches, trainer.fit_loop.epoch_loop
        if not (self.is_scheduled and loaders.slices) or epochs is None or epochs == -1 or limit is None:
            return
        steps = max(slices.steps for slices in loaders.slices)
        batches = min(steps, limit // self._plan.accumulation) if isinstance(limit, int) else int(steps * limit)
        most = sum(math.ceil(batches / self._batches_a_step_in(epoch)) for epoch in range(epochs))
        patches.replace(loop, "max_steps", most if loop.max_steps == -1 else min(most, loop.max_steps))

    def start_epoch(self, epoch: int) -> None:
        """Take the accumulation of an epoch."""
        self.batches_a_step = self._batches_a_step_in(epoch)

    def impose(self, trainer: Trainer, told: ToldSamples) -> None:
        """Let the Trainer take the epoch's accumulation, and tell what shows the speed of a step."""
        if not self.is_scheduled:
            return
        trainer.accumulate_grad_batches = self.micro_batches
        samples = self._plan.global_batch * self.batches_a_step
        if told.tell(trainer, samples) and trainer.global_rank == 0:
            log.info(
                "batch      %d samples a step from epoch %d on = %d × global_batch_size, as scheduled",
                samples, trainer.current_epoch, self.batches_a_step,
            )  # fmt: skip

    def _batches_a_step_in(self, epoch: int) -> int:
        return self._scheduler.get_accumulate_grad_batches(epoch) if self._scheduler else 1


class _Served(Mixin, GradientAccumulationScheduler):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do without Lightning's check, which refuses DeepSpeed, and micro batches."""


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
