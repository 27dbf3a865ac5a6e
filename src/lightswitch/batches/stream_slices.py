"""Places of a rank's micro-batches in a stream, which its readers follow, and what is known of the stream meanwhile."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import Any

from torch.utils.data import Sampler

from lightswitch.batches.combined import Combined
from lightswitch.batches.order import TrainingSlices
from lightswitch.batches.plan import BatchPlan, Position
from lightswitch.batches.stream import Cut, Place, Resume, last_rounds
from lightswitch.errors import Refused

log = logging.getLogger(__name__)
_ENDLESS = sys.maxsize  # number of samples of a stream of unknown length
_UNFINISHED_STEPS = 2  # that a loader may be ahead of training, because Lightning prefetches one batch


class StreamSlices(TrainingSlices):
    """Batch sampler of one rank: yields the places of its micro-batches until the stream ends.

    As with a map-style dataset, a micro-batch is a slice of the k-th G samples of the stream, G being the global batch.

    Args:
        samples: the stream's ``len()``; None if it is unknown.
        readers: number of processes that read for this rank.
    """

    def __init__(
        self,
        samples: int | None,
        drop_last: bool,
        plan: BatchPlan,
        rank: int,
        seed: int,
        at: Position,
        combined: Combined | None,
        readers: int,
    ) -> None:
        self._is_sized = samples is not None
        self._drop_last = drop_last
        self._readers = readers
        self._turn = 0
        self._short: tuple[Place, int] | None = None  # last step of the pass, if smaller, and its number of samples
        self._states: dict[int, Any] = {}  # of the dataset, by the number of the next step
        self._continued: str | None = None  # pass that was resumed from a dataset state
        total = _ENDLESS if samples is None else samples
        super().__init__(None, total, drop_last, plan, rank, seed, at.epoch, at.step, combined)

    @property
    def is_sized(self) -> bool:
        return self._is_sized

    @property
    def least_samples(self) -> int:
        return super().least_samples if self._is_sized else 0

    @property
    def is_even(self) -> bool:
        if self._is_sized:
            return super().is_even
        return self.plan.is_even and (self._drop_last or self.plan.slices == 1)

    @property
    def epoch_samples(self) -> int:
        if self._short is None:
            return super().epoch_samples
        place, samples = self._short
        return (place.step - place.begin) * self.plan.global_batch + samples

    def start_at(self, epoch: int, step: int, state: Mapping[str, Any] | None = None) -> None:
        super().start_at(epoch, step, state)
        self._kept = state

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the state that a run needs to resume at a step of the epoch.

        It also holds the dataset's state at the nearest known step up to this one, or step 0 and None if there is none.
        """
        nearest = max((one for one in self._states if one <= step), default=0)
        return {**super().state_at(step), "step": nearest, "state": self._states.get(nearest)}

    def __iter__(self) -> Iterator[Any]:
        epoch, first = self.epoch, self._first_step()
        self._turn += 1
        self._short, self._states = None, {}
        resumes = repeat(self._resume(first), self._readers)  # one for each reader: micro-batches go to readers in turn
        for step in range(first, self.steps):
            cycle = step // self.own_steps
            key, begin = self._pass_key(epoch, cycle), cycle * self.own_steps
            for micro in range(self.plan.accumulation):
                yield Place(self._turn, self._told_epoch(epoch, cycle), key, begin, step, micro, next(resumes, None))

    def _resume(self, step: int) -> Resume | None:
        if step == 0:
            return None
        begin = step // self.own_steps * self.own_steps  # first step of the pass
        if self._kept is None or not begin < self._kept.get("step", 0) <= step:  # a map-style loader's has none
            return Resume(step - begin)
        self._states[self._kept["step"]] = self._kept["state"]
        self._continued = str(self._pass_key(self.epoch, step // self.own_steps))
        return Resume(step - begin, self._kept["step"] - begin, self._kept["state"])

    def note(self, cut: Cut) -> None:
        """Record the number of samples of a micro-batch's step, and the dataset's state after it."""
        step = cut.place.step
        if cut.samples < self.plan.global_batch:
            self._short = cut.place, cut.samples
        if cut.digest is not None and str(cut.place.key) != self._continued:
            self._compare(str(cut.place.key), cut.digest)
        if cut.state is None:
            return
        self._states[step + 1] = cut.state
        latest = max((one for one in self._states if one <= step + 1 - _UNFINISHED_STEPS), default=0)
        self._states = {one: state for one, state in self._states.items() if one >= latest}

    def end(self, cut: Cut) -> None:
        """Handle the end of the stream before a step; warn if the stream's ``len()`` is wrong.

        Raises:
            Refused: the stream has no samples, or too few for one step with ``drop_last``.
        """
        steps = cut.place.step - cut.place.begin
        if steps == 0 and self._drop_last:
            raise Refused(
                f"the training stream has fewer samples than global_batch_size={self.plan.global_batch}, and its "
                "loader drops the last batch; use a smaller global_batch_size"
            )
        if steps == 0:
            raise Refused("the training stream has no samples")
        if self._is_sized and self.rank == 0:
            log.warning(
                "a training stream has ended after %d samples, but its len() is %d: correct its dataset's __len__",
                self.epoch_samples if self._short else steps * self.plan.global_batch, self.samples,
            )  # fmt: skip

    def samples_of(self, step: int, micro: int) -> list[int]:
        """Return the positions in the stream, from 0, of this rank's samples in a micro-batch."""
        begin, end = self._bounds(step, micro)
        return list(range(begin, max(end, begin + 1)))

    def step_samples(self, step: int) -> int:
        if self._short is not None and step == self._short[0].step:
            return self._short[1]
        return self.plan.global_batch


class StreamRounds(Sampler[Any]):
    """Batch sampler of an evaluation over a stream: yields the places of its rounds until the stream ends.

    Args:
        samples: the stream's ``len()``; None if it is unknown.
        plan: plan of a round, without accumulation.
    """

    def __init__(self, samples: int | None, plan: BatchPlan) -> None:
        self.samples = samples
        self.plan = plan
        self.batch_size = plan.micro_batch
        self._turn = 0
        self._own: dict[int, int] = {}  # samples of this rank's last batches, which a loader makes ahead

    def __len__(self) -> int:
        if self.samples is None:
            raise TypeError("the length of the stream is unknown")
        size, replicas = self.plan.global_batch, self.plan.replicas
        whole = max(0, (self.samples - replicas) // size)
        return whole + last_rounds(self.samples - whole * size, size, replicas)

    def __iter__(self) -> Iterator[Any]:
        self._turn += 1
        for step in range(_ENDLESS):
            yield Place(self._turn, 0, 0, 0, step, 0)

    def note(self, cut: Cut) -> None:
        """Record the number of samples of a batch, which counts with it in an evaluation."""
        self._own = {step: own for step, own in self._own.items() if step > cut.place.step - _UNFINISHED_STEPS}
        self._own[cut.place.step] = cut.own_samples

    def samples_in(self, batch_idx: int) -> int:
        """Return the number of samples of a batch that is being evaluated."""
        return self._own[batch_idx]

    def end(self, cut: Cut) -> None:
        """Do nothing: all ranks have made the same number of batches."""
