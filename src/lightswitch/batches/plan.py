"""The cut of a global batch: devices × accumulation × micro batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

from lightswitch.errors import BatchError

# Trainer arguments that Lightning counts in micro batches. Users count in steps, whatever the accumulation.
_COUNTED_IN_MICRO_BATCHES = ("limit_train_batches", "val_check_interval", "overfit_batches", "fast_dev_run")


@dataclass(frozen=True)
class BatchPlan:
    """Cut of the samples of an optimizer step into as many slices as devices take micro batches, all nearly equal.

    Attributes:
        global_batch: samples of a step, over all devices.
        micro_batch: of the largest slice; the others have one less where the global batch does not divide.
        replicas: devices that hold different samples.
        accumulation: micro batches of a step, on each device.
    """

    global_batch: int
    micro_batch: int
    replicas: int
    accumulation: int

    @classmethod
    def derive(cls, global_batch: int, micro_batch: int | None, replicas: int) -> BatchPlan:
        """Return the plan whose accumulation follows from the batch sizes and the number of devices.

        Args:
            global_batch: samples an optimizer step consumes, over all devices.
            micro_batch: the most samples that a device takes at once; None for its whole share.
            replicas: devices that hold different samples (the data-parallel world size).

        Raises:
            BatchError: a number of samples is less than one.
        """
        if global_batch < 1 or (micro_batch is not None and micro_batch < 1):
            raise BatchError(
                f"global_batch_size {global_batch} and micro_batch_size {micro_batch}: both count samples, "
                "so they are at least 1"
            )
        most = micro_batch or -(-global_batch // replicas)
        accumulation = -(-global_batch // (replicas * most))
        return cls(global_batch, -(-global_batch // (replicas * accumulation)), replicas, accumulation)

    @property
    def slices(self) -> int:
        """Slices of a step, over all devices."""
        return self.replicas * self.accumulation

    @property
    def is_even(self) -> bool:
        """Whether all slices have the same number of samples."""
        return self.global_batch % self.slices == 0

    @property
    def idle_share(self) -> float:
        """Return the share of a step's time in which devices with a smaller slice wait for those with a larger one."""
        return 1 - self.global_batch / (self.micro_batch * self.slices)

    def trainer_arguments(self, trainer: Mapping[str, object]) -> dict[str, object]:
        """Return the Trainer's arguments that count steps, as micro batches, which is what Lightning counts.

        Fractions, which mean a share of an epoch, are left out: they are `lightswitch.batches.combined.Fractions`'.
        """
        given = {name: trainer.get(name) for name in _COUNTED_IN_MICRO_BATCHES}
        return {
            name: value * self.accumulation
            for name, value in given.items()
            if isinstance(value, int) and (not isinstance(value, bool) or (name == "fast_dev_run" and value))
        }

    def __str__(self) -> str:
        size = f"{self.micro_batch}" if self.is_even else f"{self.micro_batch - 1} or {self.micro_batch}"
        idle = "" if self.is_even else f", {max(1, round(100 * self.idle_share))} % idle"
        of = f"{self.replicas} device{'s' if self.replicas > 1 else ''}"
        return f"{self.global_batch} samples a step = {size} × {of} × accumulation {self.accumulation}{idle}"


def scaled_learning_rate(lr: float, rule: str, global_batch: int, reference_batch: int) -> float:
    """Return the learning rate for a global batch, given the one that was tuned at a reference batch.

    Args:
        rule: none; linear (Goyal et al. 2017, arXiv:1706.02677); sqrt (Krizhevsky 2014, arXiv:1404.5997).

    Raises:
        ValueError: there is no such rule.
    """
    ratio = global_batch / reference_batch
    factors = {"none": 1.0, "linear": ratio, "sqrt": sqrt(ratio)}
    if rule not in factors:
        raise ValueError(f"lr_scaling.rule is {rule!r}; use one of: {', '.join(factors)}")
    return lr * factors[rule]
