"""Batches that a batch sampler forms, such as texts of similar lengths: each batch is the global batch of a step."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Sequence
from itertools import accumulate, chain, cycle, islice, pairwise
from typing import Any

from lightning.fabric.utilities.data import sized_len

from lightswitch.batches.combined import Combined
from lightswitch.batches.evaluation import EvaluationBatches, rounds
from lightswitch.batches.generators import mix
from lightswitch.batches.order import TrainingSlices, draw, splits_by_rank, undivided
from lightswitch.batches.plan import BatchPlan, Position, pieces
from lightswitch.errors import Refused

log = logging.getLogger(__name__)
_COMPARED = 100  # batches of a pass, from its start


class FormedSlices(TrainingSlices):
    """Batch sampler of one rank: yields its slices of the batches that a batch sampler forms.

    Step k takes the k-th batch, of any size, in as many slices as the plan has. An epoch has as many steps as the batch
    sampler's `len()` says when training begins, as under Lightning; where it forms fewer, the first ones come again.

    Args:
        sampler: the loader's batch sampler.
        combined: the other training loaders of the run; None if there are none.
        dataset: the loader's dataset.

    Raises:
        Refused: there are no batches; or, while they are read, one has no samples.
    """

    is_formed = True

    def __init__(
        self, sampler: Any, plan: BatchPlan, rank: int, seed: int, at: Position, combined: Combined | None, dataset: Any
    ) -> None:
        steps = _count(sampler, dataset)
        if rank == 0:
            _tell_padded(sampler, sized_len(dataset))
        super().__init__(sampler, steps, False, plan, rank, seed, at.epoch, at.step, combined, dataset)
        self.own_steps, self.samples = steps, sized_len(dataset) or steps
        self._begins_of_last: list[int] = []  # places in the order of `_last` where its batches begin
        self._sizes: dict[int, int] = {}  # samples of passes, by `_pass_key`

    def step_samples(self, step: int) -> int:
        begins, at = self._begins_of(self.epoch, step // self.own_steps), step % self.own_steps
        return begins[at + 1] - begins[at]

    def samples_before(self, steps: int, epoch: int) -> int:
        passes, rest = divmod(steps, self.own_steps)
        whole = sum(self._size(epoch, number) for number in range(passes))
        return whole + self._begins_of(epoch, passes)[rest] if rest else whole

    @property
    def epoch_samples(self) -> int:
        return self._size(self.epoch, 0)

    @property
    def least_samples(self) -> int:
        begins = self._begins_of(self.epoch, 0)
        return min(end - begin for begin, end in pairwise(begins))

    @property
    def is_even(self) -> bool:
        return self.plan.slices == 1  # batches may have any size

    def _begin(self, step: int) -> int:
        return self._begins_of(self.epoch, step // self.own_steps)[step % self.own_steps]

    def _size(self, epoch: int, cycle: int) -> int:
        """Return the number of samples of a pass, also of one that has ended, and is not drawn again."""
        key = self._pass_key(epoch, cycle)
        if key not in self._sizes:
            self._sizes[key] = len(self._order(epoch, cycle))
        return self._sizes[key]

    def _begins_of(self, epoch: int, cycle: int) -> list[int]:
        """Return where the steps of a pass begin in its order, and where the last one ends."""
        self._order(epoch, cycle)
        return self._begins_of_last

    def _drawn(self, seed: int, epoch: int, is_first: bool) -> Sequence[Any]:
        """Return the samples of a pass, batch by batch."""
        formed = _formed(self.given, self._dataset, self.own_steps, seed, epoch, is_first)
        if len(formed) < self.own_steps and self.rank == 0:
            log.warning(
                "the batch sampler %s forms %d batches, but its len() was %d when training began: the first ones are "
                "taken again, so that all epochs have as many steps; keep its len() true, and the same",
                type(self.given).__name__, len(formed), self.own_steps,
            )  # fmt: skip
        batches = [*islice(cycle(formed), self.own_steps)]
        self._begins_of_last = [*accumulate(map(len, batches), initial=0)]
        return [*chain.from_iterable(batches)]

    def _digest(self, order: Sequence[Any]) -> int:
        return mix(super()._digest(order), *self._begins_of_last[:_COMPARED])


def formed_rounds(sampler: Any, replicas: int, rank: int, seed: int, dataset: Any) -> EvaluationBatches:
    """Return each n-th batch that a batch sampler forms for an evaluation, for n ranks.

    If their number does not divide over the ranks, the largest ones are cut in two.

    Args:
        sampler: the loader's batch sampler.
        seed: seed of the order, if the batch sampler draws one.

    Raises:
        Refused: there are no batches, one has no samples, or there are fewer samples than ranks.
    """
    count = _count(sampler, dataset)
    batches = _formed(sampler, dataset, count, mix(seed, 0), 0, is_first=True)
    sizes, order = [*map(len, batches)], [*chain.from_iterable(batches)]
    cut = _cut(batches, order, replicas * rounds(len(order), len(batches), replicas))
    return EvaluationBatches(order, cut[rank::replicas], max(sizes), sizes[:_COMPARED])


def _cut(batches: list[list[Any]], order: list[Any], count: int) -> list[Sequence[Any]]:
    """Return so many batches of the same samples."""
    if count < len(batches):  # of single samples, for the most part
        return pieces(order, count)
    cut: list[Sequence[Any]] = [*batches]
    while len(cut) < count:
        largest = max(cut, key=len)
        at, half = cut.index(largest), -(-len(largest) // 2)
        cut[at : at + 1] = [largest[:half], largest[half:]]
    return cut


def _count(sampler: Any, dataset: Any) -> int:
    """Return the number of batches of all ranks."""
    count = len(_of_all_ranks(sampler, dataset))
    if not count:
        raise Refused(f"the batch sampler {type(sampler).__name__} forms no batches")
    return count


def _formed(sampler: Any, dataset: Any, count: int, seed: int, epoch: int, is_first: bool) -> list[list[Any]]:
    """Return the batches of all ranks that a batch sampler forms in a pass, at most ``count``."""
    name = type(sampler).__name__
    batches = draw(_of_all_ranks(sampler, dataset), count, seed, epoch, is_first, of_batches=True)
    splits = splits_by_rank(sampler) or splits_by_rank(getattr(sampler, "sampler", None))
    if len(batches) > count and splits:  # Lightning, too, leaves out what any other forms beyond its `len()`
        raise Refused(
            f"the batch sampler {name} splits by rank, and forms more than the {count} batches of its len() when it is "
            "to form those of all ranks; compute its len() from num_replicas, or type data.sharded_by=dataset"
        )
    if not all(batches) or not batches:
        raise Refused(f"the batch sampler {name} forms {'a batch without samples' if batches else 'no batches'}")
    return batches[:count]


def _tell_padded(sampler: Any, samples: int | None) -> None:
    """Warn if a batch sampler was made for several ranks and another number of samples, by which its batches depend on
    the number of ranks."""
    if splits_by_rank(sampler) and sampler.num_replicas > 1 and getattr(sampler, "total_size", samples) != samples:
        log.warning(
            "the batch sampler %s was made with num_replicas=%d, for which it takes %d samples of %s: other numbers "
            "of devices get other batches; give it num_replicas=1 and rank=0, and all devices share those it forms",
            type(sampler).__name__, sampler.num_replicas, sampler.total_size, samples,
        )  # fmt: skip


def _of_all_ranks(sampler: Any, dataset: Any) -> Any:
    """Return a batch sampler that forms batches of all samples: a copy, if it or its sampler splits them by rank."""
    whole, inner = undivided(sampler, dataset, forms_batches=True), getattr(sampler, "sampler", None)
    if (all_samples := undivided(inner, dataset)) is not inner:
        whole = copy.copy(whole)
        with contextlib.suppress(AttributeError):  # a property: ranks are found to draw different samples
            whole.sampler = all_samples
    return whole
