"""Accumulation by schedule: Lightning's GradientAccumulationScheduler, which counts global batches here."""

from __future__ import annotations

import logging
import math

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightswitch import patches
from lightswitch.batches.combined import Combined
from lightswitch.batches.order import TrainingSlices
from lightswitch.batches.plan import BatchPlan
from lightswitch.batches.told_samples import ToldSamples
from lightswitch.errors import Refused
from lightswitch.mixins import Mixin, with_mixin

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

    def check(self, loaders: Combined) -> None:
        """Check that the last step of an epoch is known before it is read, as steps take several batches.

        Raises:
            Refused: a stream, several loaders, or one that runs as it is.
        """
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
