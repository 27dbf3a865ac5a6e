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
    """Numbers of one optimizer step: ``global_batch == micro_batch * replicas * accumulation`` samples."""

    global_batch: int
    micro_batch: int
    replicas: int
    accumulation: int

    @classmethod
    def derive(cls, global_batch: int, micro_batch: int | None, replicas: int) -> BatchPlan:
        """Return the plan whose accumulation follows from the batch sizes and the number of devices.

        Args:
            global_batch: samples an optimizer step consumes, over all devices.
            micro_batch: samples a device takes at once; None for its whole share.
            replicas: devices that hold different samples (the data-parallel world size).

        Raises:
            BatchError: the global batch does not divide; the text has the equation.
        """
        if global_batch < 1 or (micro_batch is not None and micro_batch < 1):
            raise BatchError(
                f"global_batch_size {global_batch} and micro_batch_size {micro_batch}: both count samples, "
                "so they are at least 1"
            )
        if global_batch % replicas:
            raise BatchError(
                f"global_batch_size {global_batch} does not divide over {_devices(replicas)}: "
                f"{global_batch} / {replicas} = {global_batch / replicas:.4g}; "
                f"use global_batch_size={_alternatives(global_batch, replicas)}"
            )
        share = global_batch // replicas
        micro = share if micro_batch is None else micro_batch
        if share % micro:
            raise BatchError(
                f"global_batch_size {global_batch} is not micro_batch_size {micro} × {_devices(replicas)} × "
                f"a whole accumulation: {global_batch} / ({micro} × {replicas}) = {share / micro:.4g}; "
                f"use global_batch_size={_alternatives(global_batch, micro * replicas)} or a micro_batch_size "
                f"that divides {share}"
            )
        return cls(global_batch, micro, replicas, share // micro)

    def trainer_arguments(self, trainer: Mapping[str, object]) -> dict[str, object]:
        """Return the Trainer's arguments that count steps, as micro batches, which is what Lightning counts.

        Fractions, which mean a share of an epoch, are left out: they are `lightswitch.batches.fractions.Fractions`'.
        """
        given = {name: trainer.get(name) for name in _COUNTED_IN_MICRO_BATCHES}
        return {
            name: value * self.accumulation
            for name, value in given.items()
            if isinstance(value, int) and (not isinstance(value, bool) or (name == "fast_dev_run" and value))
        }

    def __str__(self) -> str:
        return (
            f"{self.global_batch} samples a step = {self.micro_batch} × {_devices(self.replicas)} "
            f"× accumulation {self.accumulation}"
        )


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


def _devices(count: int) -> str:
    return f"{count} device{'s' if count > 1 else ''}"


def _alternatives(wanted: int, unit: int) -> str:
    below, above = wanted // unit * unit, (wanted // unit + 1) * unit
    return f"{below} or {above}" if below else str(above)
