"""Micro-batches of an optimizer step: their samples, and the mean over these samples or over the items of a loss.

The mean over a step's samples is the mean of its micro-batches' means, weighted by their numbers of samples. A mean
over tokens is not, because a micro-batch of short texts has fewer tokens. A `training_step` that returns
``{"loss": loss, "items": n}`` declares the number of items that its loss is a mean over. The step's loss and gradient
are then means over all of its items, however they are split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightswitch.batches.loaders import Combined
from lightswitch.batches.plan import BatchPlan
from lightswitch.collectives import mean_of_ranks
from lightswitch.errors import Refused
from lightswitch.hooked_strategy import HookedStrategy, needs_closure


def check_optimizers(optimizers: Iterable[Optimizer], plan: BatchPlan) -> None:
    """Check that optimizers can step by several micro-batches, if the plan has several in a step.

    Raises:
        Refused: an optimizer evaluates the loss itself.
    """
    for optimizer in optimizers:
        if plan.accumulation > 1 and needs_closure(optimizer):
            raise Refused(
                f"{type(optimizer).__name__} evaluates the loss several times a step; with several micro batches, only "
                "the last one's loss would be evaluated; leave micro_batch_size out, or type "
                f"global_batch_size={plan.micro_batch * plan.replicas} for steps of one micro batch"
            )


def weight_and_samples(loaders: Combined, plan: BatchPlan, micro_batch: int) -> tuple[float, int | None]:
    """Return the weight of a micro-batch's mean in the mean over its step, and its samples on this rank.

    The weight is 1.0 for an even split; the number of samples is None if only the loaders know it.

    Args:
        micro_batch: index in the epoch, from 0.
    """
    if not loaders.slices:
        return 1.0, None
    weight, samples = loaders.slices[0].weight_and_samples(*divmod(micro_batch, plan.accumulation))
    # each of several loaders is split evenly
    return weight if weight == 1.0 or loaders.is_single else 1.0, None if loaders.others else samples


KEY = "items"


class Items:
    """Numbers of items that the losses of a step are means over, on this rank.

    The total is known only once the last micro-batch has been through `training_step`. Until then, each gradient is
    weighted by its number of items divided by a `unit`. In the end, the sum of the gradients is divided by the mean
    number of items per rank, divided by the same unit. The unit is a power of two near that number: in floating point,
    any other power of two gives bitwise the same run.
    """

    def __init__(self) -> None:
        self._unit: float | None = None
        self._of_batch: Tensor | None = None
        self._of_step: Tensor | None = None
        self._are_given: bool | None = None  # in all steps of a run, or in none
        self.weight: Tensor | None = None  # of the last counted micro-batch
        self.factor: Tensor | None = None  # for the losses of the last step

    def note(self, trainer: Trainer, output: Any) -> None:
        """Record the number of items that `training_step` has returned for a micro-batch.

        Raises:
            Refused: it is neither a positive number nor a tensor with one element, is missing in some micro-batches, or
                is returned under manual optimization.
        """
        given = output.get(KEY) if isinstance(output, dict) else None
        if self._are_given not in (None, given is not None):
            raise Refused(f'training_step has returned "{KEY}" in some batches and not in others; return it in each')
        self._are_given = given is not None
        self._of_batch = None if given is None else _number(given, trainer)
        self.weight = None

    def count(self, trainer: Trainer, is_of_step: bool) -> None:
        """Count the items of the last recorded micro-batch, whose gradient is about to be computed.

        Collective in the first call of a run.

        Args:
            is_of_step: False if the micro-batch repeats a sample, because the step has fewer samples than
                micro-batches.
        """
        if self._of_batch is None or trainer.world_size == trainer.accumulate_grad_batches == 1:
            return  # a single micro-batch's mean is that of the step
        if self._unit is None:
            mean = float(mean_of_ranks(self._of_batch)) * trainer.accumulate_grad_batches
            self._unit = 2.0 ** round(math.log2(max(1.0, mean)))
        counted = self._of_batch * is_of_step
        self._of_step = counted if self._of_step is None else self._of_step + counted
        self.weight = counted * (trainer.accumulate_grad_batches / self._unit)

    def divide(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Divide the gradients of a step by the number of its items, before they are clipped. Collective."""
        of_step, self._of_step, self.factor = self._of_step, None, None
        if of_step is None or self._unit is None:
            return
        self.factor = self._unit / mean_of_ranks(of_step)
        HookedStrategy.of(trainer).multiply_gradients(optimizer, self.factor)


def _number(given: Any, trainer: Trainer) -> Tensor:
    is_scalar = given.numel() == 1 if isinstance(given, Tensor) else isinstance(given, int | float) and given > 0
    if not is_scalar:
        message = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)
        raise Refused(
            f'training_step has returned {message} as "{KEY}"; return the number of items that its loss is a mean '
            "over, above 0"
        )
    if not trainer.lightning_module.automatic_optimization:
        raise Refused(f'training_step uses manual optimization, and weights its losses itself; leave "{KEY}" out')
    return torch.as_tensor(given, dtype=torch.float32, device=trainer.strategy.root_device).detach().reshape(())
