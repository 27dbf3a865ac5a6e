"""Several training loaders that make a batch together, and fractions of an epoch in whole steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer

from lightswitch import patches
from lightswitch.batches.plan import BatchPlan
from lightswitch.errors import Refused

CYCLE = "max_size_cycle"  # Lightning's own choice for a list or a dict of loaders


def _default_mode() -> str:
    return CYCLE


class Slices(Protocol):
    """Interface that `Combined` needs of a batch sampler; `lightswitch.batches.order.TrainingSlices` is one."""

    samples: int
    plan: BatchPlan
    own_steps: int

    @property
    def is_sized(self) -> bool: ...

    @property
    def steps(self) -> int: ...

    @property
    def epoch_samples(self) -> int: ...

    @property
    def is_even(self) -> bool: ...

    def start_at(self, epoch: int, step: int, state: Mapping[str, Any] | None = None) -> None: ...

    def state_at(self, step: int) -> dict[str, Any] | None: ...

    def weight(self, step: int, micro: int) -> float: ...

    def step_samples(self, step: int) -> int: ...

    def samples_of(self, step: int, micro: int) -> list[Any]: ...


class Combined:
    """Training loaders of one run, and how many steps an epoch over all of them has.

    Args:
        mode: returns the mode of Lightning's CombinedLoader; asked only once there is one.
    """

    def __init__(self, mode: Callable[[], str] = _default_mode) -> None:
        self.mode = mode
        self.slices: list[Slices] = []
        self.others: list[Any] = []  # the loaders that run as they are

    def add(self, slices: Slices) -> int:
        """Add a loader that the engine cuts, and return its index, which sets its order apart from other loaders'."""
        self.slices.append(slices)
        return len(self.slices) + len(self.others) - 1

    def add_other(self, loader: Any) -> None:
        """Add a loader that runs as it is, which counts toward the length of an epoch alone."""
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
        """Return how many optimizer steps a loader makes in an epoch, given how many its own samples are enough for.

        In the mode max_size_cycle a shorter loader is read again by its own sampler. Lightning would begin it anew, and
        after a resume at other samples.
        """
        if self.is_single or self.mode() != CYCLE or not self.slices:
            return own_steps
        accumulation = self.slices[0].plan.accumulation
        others = (-(-(sized_len(loader) or 0) // accumulation) for loader in self.others)
        return max(*(slices.own_steps for slices in self.slices), *others, own_steps)

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch, over all ranks, of the loader that decides how long an epoch is."""
        shortest = self.mode() == "min_size" and not self.is_single
        decides = (min if shortest else max)(self.slices, key=lambda slices: slices.own_steps)
        return decides.epoch_samples

    @property
    def samples(self) -> int:
        """Samples of all loaders together, by which a resumed run finds that its data are not the same; 0 where no
        number is known."""
        return sum(slices.samples for slices in self.slices if slices.is_sized)

    def check(self) -> None:
        """Check that the loaders can be combined so that the run is the same at any world size.

        Raises:
            Refused: the mode is one that no Trainer fits on, or a batch of several loaders does not divide evenly.
        """
        if self.mode() == "sequential":
            raise Refused(
                "the training loaders are a CombinedLoader with mode=sequential, which no Trainer fits on; "
                "use min_size, max_size_cycle or max_size"
            )
        if self.is_single:
            return
        if not self.is_sized and self.mode() == CYCLE:
            raise Refused(
                "a training stream, one of several loaders, has no len(), so it is unknown which one ends last; give "
                "its dataset a __len__, or use a CombinedLoader with mode=min_size or max_size"
            )
        for slices in self.slices:
            if not slices.is_even:
                raise Refused(_uneven(slices))


def _uneven(slices: Slices) -> str:
    plan = slices.plan
    if not plan.is_even:
        return (
            f"global_batch_size {plan.global_batch} does not divide over {plan.replicas} devices × accumulation "
            f"{plan.accumulation}, as it has to for several training loaders; use global_batch_size="
            f"{plan.micro_batch * plan.slices}"
        )
    which = "stream, one of several loaders, may end with a batch that"
    if slices.is_sized:
        last = slices.epoch_samples % plan.global_batch
        which = f"loader of {slices.samples} samples, one of several, ends with a batch of {last}, which"
    return (
        f"a training {which} does not "
        f"divide over {plan.replicas} devices × accumulation {plan.accumulation}; give that loader drop_last=True"
    )


class Fractions:
    """Fractions that a Trainer was given as `limit_train_batches`, `overfit_batches` or `val_check_interval`.

    Lightning takes them of micro batches, so that a run would depend on how its steps are cut.
    """

    def __init__(self, plan: BatchPlan) -> None:
        self._plan = plan
        self._limit: float | int | None = None
        self._interval: float | int | None = None

    def note(self, trainer: Trainer) -> None:
        """Take the fractions of a Trainer that begins to fit."""
        self._limit, self._interval = trainer.limit_train_batches, trainer.val_check_interval

    def round(self, trainer: Trainer, loaders: Combined) -> None:
        """Let the Trainer count micro batches of whole steps, of a single loader whose length is known."""
        if not (loaders.is_single and loaders.slices and loaders.is_sized):
            return
        steps, accumulation = loaders.slices[0].steps, self._plan.accumulation
        if isinstance(self._limit, float) and self._limit < 1.0:
            steps = int(steps * self._limit)
            patches.replace(trainer, "limit_train_batches", steps * accumulation)
        elif isinstance(self._limit, int):
            steps = min(steps, self._limit // accumulation)
        if isinstance(self._interval, float) and self._interval < 1.0:
            patches.replace(trainer, "val_check_interval", max(1, int(steps * self._interval)) * accumulation)
