"""Losses that are means over something else than samples: over tokens that are not padding, boxes, frames.

The mean over a step's samples is that of its micro batches' means, weighted by their samples. A mean over tokens is
not: a micro batch of short texts has fewer. A `training_step` that returns ``{"loss": loss, "items": n}`` says what its
loss is a mean over, and then the step's loss and gradient are the means over all of its items, however they are cut.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer

from lightswitch.errors import Refused
from lightswitch.hooked_strategy import HookedStrategy

KEY = "items"


class Items:
    """Numbers of items that the losses of a step are means over; on this rank.

    How many there are in all is known once the last micro batch has been through `training_step`. Until then each
    gradient is weighted by its number over a `unit`, and their sum is divided by the mean number of a rank over that
    unit. It is a power of two near that number: in floating point any other gives the same run to the bit.
    """

    def __init__(self) -> None:
        self._unit: float | None = None
        self._of_batch: Tensor | None = None
        self._of_step: Tensor | None = None
        self._are_given: bool | None = None  # by all steps of a run, or by none
        self.weight: Tensor | None = None  # of the micro batch that was counted last
        self.factor: Tensor | None = None  # of the losses of the step that was taken last

    def note(self, trainer: Trainer, output: Any) -> None:
        """Note what `training_step` has returned for a micro batch.

        Raises:
            Refused: its items are no positive number, come in some micro batches alone, or in optimization by hand.
        """
        given = output.get(KEY) if isinstance(output, dict) else None
        if self._are_given not in (None, given is not None):
            raise Refused(f'training_step has returned "{KEY}" in some batches and not in others; return it in each')
        self._are_given = given is not None
        self._of_batch = None if given is None else _number(given, trainer)
        self.weight = None

    def count(self, trainer: Trainer, is_of_step: bool) -> None:
        """Count the micro batch that was noted last, whose gradient is about to be computed.

        Collective in the first of a run.

        Args:
            is_of_step: False for one that repeats a sample, as a step has fewer than there are micro batches.
        """
        if self._of_batch is None or _is_whole(trainer):
            return
        if self._unit is None:
            mean = float(_mean(trainer.strategy, self._of_batch)) * trainer.accumulate_grad_batches
            self._unit = 2.0 ** round(math.log2(max(1.0, mean)))
        counted = self._of_batch * is_of_step
        self._of_step = counted if self._of_step is None else self._of_step + counted
        self.weight = counted * (trainer.accumulate_grad_batches / self._unit)

    def divide(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Divide the gradients of a step by the number of its items, before they are clipped. Collective."""
        of_step, self._of_step, self.factor = self._of_step, None, None
        if of_step is None or self._unit is None:
            return
        self.factor = self._unit / _mean(trainer.strategy, of_step)
        HookedStrategy.of(trainer).multiply_gradients(optimizer, self.factor)


def _number(given: Any, trainer: Trainer) -> Tensor:
    is_scalar = given.numel() == 1 if isinstance(given, Tensor) else isinstance(given, int | float) and given > 0
    if not is_scalar:
        told = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)
        raise Refused(f'training_step has returned {told} as "{KEY}"; return the number of items of its loss, above 0')
    if not trainer.lightning_module.automatic_optimization:
        raise Refused(f'training_step optimizes by hand, and weights its losses itself; leave "{KEY}" out')
    return torch.as_tensor(given, dtype=torch.float32, device=trainer.strategy.root_device).detach().reshape(())


def _is_whole(trainer: Trainer) -> bool:
    """Return whether a step is one micro batch of one process, whose mean is the step's."""
    return trainer.world_size == 1 and trainer.accumulate_grad_batches == 1


def _mean(strategy: Strategy, number: Tensor) -> Tensor:
    mean: Tensor = strategy.reduce(number.clone(), reduce_op="mean")
    return mean
