"""Several training loaders that make a batch together, as Lightning's CombinedLoader does; of most runs it is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from lightswitch.batches.plan import BatchPlan
from lightswitch.errors import Refused

CYCLE = "max_size_cycle"  # Lightning's own choice for a list or a dict of loaders


def _lightnings() -> str:
    return CYCLE


class Slices(Protocol):
    """What is asked of each loader: how an epoch of it is cut (lightswitch.batches.order)."""

    samples: int
    plan: BatchPlan
    own_steps: int

    @property
    def steps(self) -> int: ...

    @property
    def epoch_samples(self) -> int: ...

    @property
    def is_even(self) -> bool: ...

    def weight(self, step: int, micro: int) -> float: ...

    def samples_of(self, step: int, micro: int) -> list[Any]: ...


class Combined:
    """
    Args:
        mode: of the CombinedLoader, once there is one.
    """

    def __init__(self, mode: Callable[[], str] = _lightnings) -> None:
        self.mode = mode
        self.slices: list[Slices] = []
        self._others: list[int] = []  # batches of the loaders that run as they are

    def add(self, slices: Slices) -> int:
        """Its index among the loaders, by which loaders of as many samples are not shuffled alike."""
        self.slices.append(slices)
        return len(self.slices) + len(self._others) - 1

    def add_other(self, loader: Any) -> None:
        self._others.append(len(loader) if hasattr(loader, "__len__") else 0)

    @property
    def is_one(self) -> bool:
        return len(self.slices) + len(self._others) == 1

    def steps_of(self, own_steps: int) -> int:
        """How many steps a loader reads in an epoch. Where Lightning began the shorter ones anew, it would do so at
        other samples after a resume: here they go on by themselves."""
        if self.is_one or self.mode() != CYCLE or not self.slices:
            return own_steps
        accumulation = self.slices[0].plan.accumulation
        others = (-(-batches // accumulation) for batches in self._others)
        return max(*(slices.own_steps for slices in self.slices), *others, own_steps)

    @property
    def epoch_samples(self) -> int:
        """Of the loader that decides how long an epoch is."""
        shortest = self.mode() == "min_size" and not self.is_one
        decides = (min if shortest else max)(self.slices, key=lambda slices: slices.own_steps)
        return decides.epoch_samples

    @property
    def samples(self) -> int:
        """By which a resumed run knows whether its data are the same."""
        return sum(slices.samples for slices in self.slices)

    def check(self) -> None:
        """
        Raises:
            Refused: they can't be combined so that the run is the same at any world size.
        """
        if self.mode() == "sequential":
            raise Refused(
                "the training loaders are a CombinedLoader with mode=sequential, which no Trainer fits on; "
                "use min_size, max_size_cycle or max_size"
            )
        for slices in self.slices:
            if not self.is_one and not slices.is_even:
                raise Refused(_uneven(slices))


def _uneven(slices: Slices) -> str:
    plan = slices.plan
    last = slices.epoch_samples % plan.global_batch
    return (
        f"a training loader of {slices.samples} samples, one of several, ends with a batch of {last}, which does not "
        f"divide over {plan.replicas} devices × accumulation {plan.accumulation}; give that loader drop_last=True"
    )
