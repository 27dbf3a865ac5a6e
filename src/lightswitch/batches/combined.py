"""Several training loaders that make a batch together, and fractions of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer

from lightswitch.batches.generators import mix
from lightswitch.batches.plan import BatchPlan
from lightswitch.errors import Refused

Slices = Any  # `lightswitch.batches.order.TrainingSlices`, whose file imports this one
CYCLE = "max_size_cycle"  # Lightning's default for a list or a dict of loaders


def _default_mode() -> str:
    return CYCLE


class Combined:
    """Training loaders of a run, and the number of steps of an epoch over all of them.

    Args:
        mode: returns the mode of Lightning's CombinedLoader; called only once there is one.
    """

    def __init__(self, mode: Callable[[], str] = _default_mode) -> None:
        self.mode = mode
        self.slices: list[Slices] = []
        self.others: list[Any] = []  # loaders that run unchanged
        self.makes_batches = False  # each sample of a dataset is a batch

    def add(self, slices: Slices) -> int:
        """Add the batch sampler of a copied loader; return its index, which is part of the loader's seeds."""
        self.slices.append(slices)
        return len(self.slices) + len(self.others) - 1

    def note_batches(self, are_samples: bool) -> None:
        """Record whether each sample of a loader's dataset is a batch."""
        self.makes_batches |= are_samples

    def add_other(self, loader: Any) -> None:
        """Add a loader that runs unchanged, and only counts toward the length of an epoch."""
        self.others.append(loader)

    @property
    def is_single(self) -> bool:
        """Whether the run has a single training loader."""
        return len(self.slices) + len(self.others) == 1

    @property
    def is_sized(self) -> bool:
        """Whether the number of steps of an epoch is known before it ends."""
        return all(slices.is_sized for slices in self.slices)

    def steps_of(self, own_steps: int) -> int:
        """Return the number of optimizer steps that a loader makes in an epoch.

        In the mode max_size_cycle, the sampler of a shorter loader repeats its samples. Lightning would restart the
        loader instead, which after a resume would begin with other samples.

        Args:
            own_steps: number of steps for which the loader's samples suffice once.
        """
        if self.is_single or self.mode() != CYCLE or not self.slices:
            return own_steps
        accumulation = self.slices[0].plan.accumulation
        others = (-(-(sized_len(loader) or 0) // accumulation) for loader in self.others)
        return int(max(*(slices.own_steps for slices in self.slices), *others, own_steps))

    @property
    def is_formed(self) -> bool:
        """Whether the loaders make the sizes of batches, in place of the plan."""
        return all(slices.is_formed for slices in self.slices)

    def samples_before(self, steps: int, epoch: int) -> int:
        """Return the samples of an epoch's first steps, over all ranks, of the loader that determines its length."""
        return int(self._decides.samples_before(steps, epoch))

    @property
    def mean_samples(self) -> int:
        """Samples of a step of this epoch on average, over all ranks, of the loader that determines its length."""
        samples: float = self._decides.epoch_samples / self._decides.own_steps
        return round(samples)

    @property
    def _decides(self) -> Slices:
        shortest = self.mode() == "min_size" and not self.is_single
        return (min if shortest else max)(self.slices, key=lambda slices: slices.own_steps)

    @property
    def digest(self) -> int:
        """Digest of the samples that the loaders now begin with, below 2^63: equal on ranks that draw the same."""
        return mix(*(slices.digest for slices in self.slices)) >> 1

    @property
    def samples(self) -> int:
        """Total samples of the loaders of known length (0 if none), by which a resumed run detects changed data."""
        return sum(slices.samples for slices in self.slices if slices.is_sized)

    def check(self) -> None:
        """Check that a run with these loaders is the same at any world size.

        Raises:
            Refused: no Trainer can fit in the mode, it is unknown which loader ends last, or a batch of several loaders
                does not divide evenly.
        """
        if self.mode() == "sequential":
            raise Refused(
                "the training loaders are a CombinedLoader with mode=sequential, which the Trainer can't fit on; "
                "use min_size, max_size_cycle or max_size"
            )
        if self.is_single:
            return
        if not self.is_sized and self.mode() == CYCLE:
            raise Refused(
                "a training stream, one of several loaders, has no len(), so it is unknown which loader ends last; "
                "give its dataset a __len__, or use a CombinedLoader with mode=min_size or max_size"
            )
        for slices in self.slices:
            if not slices.is_even:
                raise Refused(_uneven(slices))


def _uneven(slices: Slices) -> str:
    plan = slices.plan
    if not plan.is_even:
        return (
            f"global_batch_size {plan.global_batch} does not divide over {plan.replicas} devices × accumulation "
            f"{plan.accumulation}, as several training loaders require; use global_batch_size="
            f"{plan.micro_batch * plan.slices}"
        )
    if slices.is_formed:
        return (
            "one of several training loaders has a batch sampler, whose batches may have any size: they are not cut "
            f"over {plan.replicas} devices × accumulation {plan.accumulation}; use one device without accumulation, or "
            "batches of one size (batch_size=N)"
        )
    which = "stream, one of several loaders, may end with a batch that"
    if slices.is_sized:
        last = slices.epoch_samples % plan.global_batch
        which = f"loader of {slices.samples} samples, one of several, ends with a batch of {last}, which"
    return (
        f"a training {which} does not "
        f"divide over {plan.replicas} devices × accumulation {plan.accumulation}; set drop_last=True in that loader"
    )


def check_fractions(trainer: Trainer, plan: BatchPlan) -> None:
    """Check that fractions of an epoch have whole steps: Lightning counts micro-batches.

    Raises:
        Refused: one ends within a step.
    """
    limit = "overfit_batches" if trainer.overfit_batches else "limit_train_batches"  # type: ignore[attr-defined]  # set past Lightning's declaration
    counted: dict[str, Any] = {limit: trainer.num_training_batches, "val_check_interval": trainer.val_check_batch}
    for name, micro_batches in counted.items():
        fraction = getattr(trainer, name)
        if isinstance(fraction, float) and fraction < 1.0 and micro_batches % plan.accumulation:
            raise Refused(
                f"trainer.{name}={fraction} of an epoch is {micro_batches} micro batches, and {plan.accumulation} are "
                f"a step; type a number of steps, as trainer.{name}={max(1, int(micro_batches) // plan.accumulation)}"
            )


def refuse_unvalidated(trainer: Trainer) -> None:
    """Check that a schedule which reads a metric of validation finds one at the end of its epochs.

    Raises:
        Refused: there is none yet.
    """
    if not trainer.lightning_module.automatic_optimization:  # Lightning steps no schedule
        return
    every, first = trainer.check_val_every_n_epoch, trainer.val_check_batch
    for config in (config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau):
        of_validation = str(config.monitor).lower().startswith(("val", "eval"))
        if config.interval != "epoch" or not config.strict or not of_validation:
            continue
        if every is not None and config.frequency % every:
            raise Refused(
                f"ReduceLROnPlateau reads {config.monitor} every {config.frequency} epochs, but validation "
                f'runs every {every}; in configure_optimizers, write "frequency": {every} beside '
                '"monitor", or type trainer.check_val_every_n_epoch=1'
            )
        micro_batches = trainer.num_training_batches * config.frequency
        if (
            every is None
            and first is not None
            and first > micro_batches
            and config.monitor not in trainer.callback_metrics
        ):
            steps = trainer.accumulate_grad_batches
            raise Refused(
                f"ReduceLROnPlateau reads {config.monitor} after {micro_batches / steps:g} steps, at the end of an "
                f"epoch, but the first validation is after {first / steps:g}; type trainer.check_val_every_n_epoch=1 "
                "to validate once an epoch"
            )
