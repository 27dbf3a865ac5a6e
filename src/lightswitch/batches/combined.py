"""Several training loaders that make a batch together, and fractions of an epoch in whole steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer

from lightswitch import patches
from lightswitch.batches.generators import mix
from lightswitch.batches.plan import BatchPlan
from lightswitch.errors import Refused

CYCLE = "max_size_cycle"  # Lightning's default for a list or a dict of loaders


def _default_mode() -> str:
    return CYCLE


class Slices(Protocol):
    """Interface of batch samplers that `Combined` needs; `lightswitch.batches.order.TrainingSlices` implements it."""

    samples: int
    plan: BatchPlan
    own_steps: int
    is_formed: bool

    @property
    def is_sized(self) -> bool: ...

    @property
    def steps(self) -> int: ...

    @property
    def epoch_samples(self) -> int: ...

    @property
    def is_even(self) -> bool: ...

    @property
    def digest(self) -> int: ...

    def start_at(self, epoch: int, step: int, state: Mapping[str, Any] | None = None) -> None: ...

    def state_at(self, step: int) -> dict[str, Any]: ...

    def samples_before(self, steps: int, epoch: int) -> int: ...

    def weight(self, step: int, micro: int) -> float: ...

    def step_samples(self, step: int) -> int: ...

    def samples_of(self, step: int, micro: int) -> list[Any]: ...


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
        return max(*(slices.own_steps for slices in self.slices), *others, own_steps)

    @property
    def is_formed(self) -> bool:
        """Whether the loaders make the sizes of batches, in place of the plan."""
        return all(slices.is_formed for slices in self.slices)

    def samples_before(self, steps: int, epoch: int) -> int:
        """Return the samples of an epoch's first steps, over all ranks, of the loader that determines its length."""
        return self._decides.samples_before(steps, epoch)

    @property
    def mean_samples(self) -> int:
        """Samples of a step of this epoch on average, over all ranks, of the loader that determines its length."""
        return round(self._decides.epoch_samples / self._decides.own_steps)

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


class Fractions:
    """Fractions that are given to a Trainer as `limit_train_batches`, `overfit_batches` or `val_check_interval`.

    Lightning applies them to micro-batches, so that a run would depend on how its steps are split.
    """

    def __init__(self, plan: BatchPlan) -> None:
        self._plan = plan
        self._limit: float | int | None = None
        self._interval: float | int | None = None

    def note(self, trainer: Trainer) -> None:
        """Store the fractions of a Trainer that begins to fit."""
        self._limit, self._interval = trainer.limit_train_batches, trainer.val_check_interval

    def round(self, trainer: Trainer, loaders: Combined) -> None:
        """Convert the fractions to micro-batches of whole steps, for a single loader of known length.

        Those of several loaders are left to Lightning, which knows the epoch's length once it has combined them.

        Raises:
            Refused: a fraction of the epoch is less than a step, so that nothing would be trained on, or that of
                several loaders may end within a step.
        """
        if not loaders.is_single:
            for name, value in (("limit_train_batches", self._limit), ("val_check_interval", self._interval)):
                if not isinstance(value, float) or value >= 1.0:
                    continue
                if self._plan.accumulation > 1:
                    raise Refused(
                        f"trainer.{name}={value} of several training loaders may end within a step of "
                        f"{self._plan.accumulation} micro batches; type a number of steps"
                    )
                patches.replace(trainer, name, value)  # not that of the first loader alone
        if not (loaders.is_single and loaders.slices and loaders.is_sized):
            return
        steps, accumulation = loaders.slices[0].steps, self._plan.accumulation
        if isinstance(self._limit, float) and self._limit < 1.0:
            if 0 < steps * self._limit < 1:
                overfits = trainer.overfit_batches  # type: ignore[attr-defined]  # set past Lightning's declaration
                name = "overfit_batches" if overfits else "limit_train_batches"
                raise Refused(
                    f"trainer.{name}={self._limit} of {steps} steps an epoch is less than one step; type a larger "
                    f"fraction, or a number of steps, as trainer.{name}=1"
                )
            steps = int(steps * self._limit)
            patches.replace(trainer, "limit_train_batches", steps * accumulation)
        elif isinstance(self._limit, int):
            steps = min(steps, self._limit // accumulation)
        if isinstance(self._interval, float) and self._interval < 1.0:
            patches.replace(trainer, "val_check_interval", max(1, int(steps * self._interval)) * accumulation)
