"""The order in which a loader asks for micro batches of a stream, and what is known of those that have come."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import Any

from torch.utils.data import Sampler

from lightswitch.batches.combined import Combined
from lightswitch.batches.order import TrainingSlices
from lightswitch.batches.plan import BatchPlan
from lightswitch.batches.position import Position
from lightswitch.batches.stream import Cut, Place, Resume, last_rounds
from lightswitch.errors import Refused

log = logging.getLogger(__name__)

_ENDLESS = sys.maxsize  # samples of a stream whose length is unknown
_UNFINISHED_STEPS = 2  # that a loader may be ahead of training, as Lightning looks one batch ahead


class StreamSlices(TrainingSlices):
    """Batch sampler of one rank: the places of its micro batches, until the stream ends.

    The place of a micro batch is the same as a map-style dataset's: a slice of the k-th G samples of the stream.

    Args:
        samples: of the stream, as its ``len()`` says; None where that is unknown.
        readers: processes that read for this rank.
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
        self._short: tuple[Place, int] | None = None  # the pass's last step, and its samples
        self._states: dict[int, Any] = {}  # of the dataset, by the step that comes next
        self._begins: dict[str, int] = {}  # digests of the first samples of passes that were read from their start
        self._continued: str | None = None  # the pass that went on from a state
        total = _ENDLESS if samples is None else samples
        super().__init__(None, total, drop_last, plan, rank, seed, at.epoch, at.step, combined)

    @property
    def is_sized(self) -> bool:
        return self._is_sized

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
        super().start_at(epoch, step)
        self._kept = state
        self._begins |= (state or {}).get("begins", {})

    def state_at(self, step: int) -> dict[str, Any] | None:
        """Return what a run that goes on at a step of the epoch needs; None at the epoch's start.

        The state is the dataset's at the nearest known step up to this one; step 0 and None if there is none. Beside it
        are digests of the samples that passes began with.
        """
        nearest = max((one for one in self._states if one <= step), default=0)
        return {"step": nearest, "state": self._states.get(nearest), "begins": self._begins} if step else None

    def __iter__(self) -> Iterator[Any]:
        epoch, first = self.epoch, self._first_step()
        self._turn += 1
        self._short, self._states = None, {}
        resumes = repeat(self._resume(first), self._readers)  # micro batches are dealt to readers in turn
        for step in range(first, self.steps):
            cycle = step // self.own_steps
            key, begin = self._pass_key(epoch, cycle), cycle * self.own_steps
            for micro in range(self.plan.accumulation):
                yield Place(self._turn, self._told_epoch(epoch, cycle), key, begin, step, micro, next(resumes, None))

    def _resume(self, step: int) -> Resume | None:
        if step == 0:
            return None
        begin = step // self.own_steps * self.own_steps  # of the pass
        if self._kept is None or not begin < self._kept["step"] <= step:
            return Resume(step - begin)
        self._states[self._kept["step"]] = self._kept["state"]
        self._continued = str(self._pass_key(self.epoch, step // self.own_steps))
        return Resume(step - begin, self._kept["step"] - begin, self._kept["state"])

    def note(self, cut: Cut) -> None:
        """Note what came beside a micro batch: how many samples its step has, and the state after it."""
        step = cut.place.step
        if cut.samples < self.plan.global_batch:
            self._short = cut.place, cut.samples
        if cut.digest is not None:
            self._compare(str(cut.place.key), cut.digest)
        if cut.state is None:
            return
        self._states[step + 1] = cut.state
        latest = max((one for one in self._states if one <= step + 1 - _UNFINISHED_STEPS), default=0)
        self._states = {one: state for one, state in self._states.items() if one >= latest}

    def _compare(self, of_pass: str, digest: int) -> None:
        """Warn if a pass begins with other samples than it did in the run that is resumed."""
        if of_pass == self._continued:
            return
        if self._begins.get(of_pass, digest) != digest and self.rank == 0:
            log.warning(
                "a stream does not begin as it did before, so that the run does not go on at its sample: its data have "
                "changed, or its order is drawn anew by each process; let it draw from the generators of torch, NumPy "
                "and Python, or from one that set_epoch seeds"
            )
        self._begins = {of_pass: digest}

    def end(self, cut: Cut) -> None:
        """Note that the stream has ended before a step.

        Raises:
            Refused: it has none.
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
                "a training stream has ended after %d samples, and its len() is %d: correct its dataset's __len__",
                self.epoch_samples if self._short else steps * self.plan.global_batch, self.samples,
            )  # fmt: skip

    def samples_of(self, step: int, micro: int) -> list[int]:
        """Return the positions in the stream, from 0, of this rank's samples in a micro batch."""
        begin, end = self._bounds(step, micro)
        return list(range(begin, max(end, begin + 1)))

    def step_samples(self, step: int) -> int:
        if self._short is not None and step == self._short[0].step:
            return self._short[1]
        return self.plan.global_batch


class StreamRounds(Sampler[Any]):
    """Batch sampler of an evaluation over a stream: the places of its rounds, until the stream ends.

    Args:
        samples: of the stream, as its ``len()`` says; None where that is unknown.
        plan: of a round, without accumulation.
    """

    def __init__(self, samples: int | None, plan: BatchPlan) -> None:
        self.samples = samples
        self.plan = plan
        self.batch_size = plan.micro_batch
        self._turn = 0

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
        """Do nothing: a round's samples count by the batch that they are in."""

    def end(self, cut: Cut) -> None:
        """Do nothing: each rank has made as many batches."""
