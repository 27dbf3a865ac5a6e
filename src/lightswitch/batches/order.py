"""Samples that a rank reads, their order and all random numbers, as functions of (seed, epoch, step) alone.

A resumed run draws the same numbers as an uninterrupted one, and a sample is augmented in the same way on any rank and
in any loader worker.
"""

from __future__ import annotations

import copy
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from numbers import Integral
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler, Subset

from lightswitch.batches.combined import Combined
from lightswitch.batches.generators import mix, own_generators, seed_generators, seed_own
from lightswitch.batches.plan import BatchPlan
from lightswitch.batches.stand_ins import StandIn
from lightswitch.errors import Refused

log = logging.getLogger(__name__)
_COMPARED_SAMPLES = 1000  # of a pass, from its start
_SPLIT = "dataset"  # key of the digest of a dataset's first samples
_COMPARED_KEYS = (Integral, torch.Tensor, str, tuple)  # which print the same in every process


class TrainingSlices(StandIn, Sampler[Any]):
    """Batch sampler of one rank: yields its slices of every global batch of an epoch.

    Step k takes ``order[k*G:(k+1)*G]``, a global batch of G samples; micro-batch m of rank r is slice
    ``m * replicas + r`` of it. A step that does not divide evenly, such as a smaller last one, is split as evenly as
    possible. The length is that of a whole epoch, even if a resumed epoch yields only the rest, so that Lightning
    recognizes the last batch. Next to a longer loader, the sampler may go through its samples several times in an
    epoch, each time in another order.

    Args:
        sampler: the loader's sampler, which draws the order, and whose weights, for example, a callback may change.
        samples: samples of an epoch, over all ranks.
        drop_last: omit a smaller last step.
        rank: this process's data-parallel rank, below ``plan.replicas``.
        epoch: epoch in which the run starts.
        step: optimizer steps of that epoch that have been taken already.
        combined: the other training loaders of the run; None if there are none.
        dataset: the loader's dataset, if the sampler draws from one.

    Attributes:
        is_formed: the sampler makes the sizes of steps, in place of the plan.
    """

    is_formed = False

    def __init__(
        self,
        sampler: Any,
        samples: int,
        drop_last: bool,
        plan: BatchPlan,
        rank: int,
        seed: int,
        epoch: int,
        step: int,
        combined: Combined | None = None,
        dataset: Any = None,
    ) -> None:
        self._last: tuple[int, Sequence[Any]] | None = None  # the pass drawn last, by `_pass_key`, and its order
        self._dataset = dataset
        self._split = digest(range(min(_COMPARED_SAMPLES, sized_len(dataset) or 0)), dataset)
        self._begins: dict[str, int] = {}  # digests of the dataset's first samples, and of those of the current pass
        self.samples = samples  # of an epoch, over all ranks
        self.plan = plan
        self.rank = rank
        self.seed = seed
        self.start_at(epoch, step)
        self.own_steps = samples // plan.global_batch if drop_last else -(-samples // plan.global_batch)
        self.batch_size = plan.micro_batch  # DeepSpeed reads it
        self.combined = combined or Combined()
        self.index = self.combined.add(self)
        self.given = sampler

    def __len__(self) -> int:
        if not self.combined.is_sized:  # Lightning then prefetches a batch, to find the epoch's last one
            raise TypeError("the length of an epoch is unknown, because it ends when a stream ends")
        return self.steps * self.plan.accumulation

    @property
    def is_sized(self) -> bool:
        """Whether the number of samples is known before they are read."""
        return True

    @property
    def steps(self) -> int:
        """Optimizer steps of a whole epoch."""
        return self.combined.steps_of(self.own_steps)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order the next iterator yields. Lightning calls this method."""
        self.epoch = epoch

    def start_at(self, epoch: int, step: int, state: Mapping[str, Any] | None = None) -> None:
        """Set another start position than that of the constructor, before the first batch.

        Args:
            state: result of `state_at` at that position.
        """
        self.epoch, self._resumed = epoch, (epoch, step)
        self._begins |= (state or {}).get("begins", {})

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the state that a resume at a step of the epoch needs besides the position.

        It holds digests of the samples that the dataset and, within an epoch, the current pass begin with.
        """
        return {"begins": self._begins if step else {_SPLIT: self._split}}

    @property
    def digest(self) -> int:
        """Digest of the samples that the current pass begins with, the same on every rank that draws the same."""
        return mix(*self._begins.values())

    def __iter__(self) -> Iterator[tuple[int, int, list[Any]]]:
        # A generator, so that epoch and step are read when the first batch is requested: with workers,
        # DataLoader makes two iterators and uses one.
        epoch = self.epoch
        first = self._first_step()
        cycle = -1
        for step in range(first, self.steps):
            if step // self.own_steps != cycle:
                cycle = step // self.own_steps
                key = self._pass_key(epoch, cycle)
                order = self._order(epoch, cycle)
                self._compare(str(key), self._digest(order))
            for micro in range(self.plan.accumulation):
                yield key, self._bounds(step, micro)[0], self._chosen(order, step, micro)

    def _digest(self, order: Sequence[Any]) -> int:
        return digest(order, self._dataset)

    def _compare(self, of_pass: str, digest: int) -> None:
        """Warn if a pass begins with other samples than in the run that is resumed."""
        begins = {_SPLIT: self._split, of_pass: digest}
        if any(self._begins.get(key, begin) != begin for key, begin in begins.items()) and self.rank == 0:
            log.warning(
                "training starts with different samples than before, so the run can't resume at the same sample: its "
                "data have changed, or each process splits or shuffles them in another way; let them draw from the "
                "global generators of torch, NumPy and Python, or from one with a seed, which set_epoch changes"
            )
        self._begins = begins

    def _first_step(self) -> int:
        return self._resumed[1] if self.epoch == self._resumed[0] else 0

    def samples_of(self, step: int, micro: int) -> list[Any]:
        """Return the indices of this rank's samples in a micro-batch of the current epoch."""
        return self._chosen(self._order(self.epoch, step // self.own_steps), step, micro)

    def _order(self, epoch: int, cycle: int) -> Sequence[Any]:
        key = self._pass_key(epoch, cycle)
        if self._last is None or self._last[0] != key:
            is_first = self._last is None
            self._last = key, self._drawn(mix(self.seed, key), self._told_epoch(epoch, cycle), is_first)
        return self._last[1]

    def _drawn(self, seed: int, epoch: int, is_first: bool) -> Sequence[Any]:
        return epoch_order(self.given, self.samples, seed, epoch, is_first)

    @staticmethod
    def _told_epoch(epoch: int, cycle: int) -> int:
        """Return the epoch for `set_epoch` in a pass over the samples, in 31 bits: some samplers accept no more."""
        return epoch if cycle == 0 else mix(epoch, cycle) >> 33

    @property
    def epoch_samples(self) -> int:
        """Samples of one pass, over all ranks, without those that drop_last omits."""
        return min(self.samples, self.own_steps * self.plan.global_batch)

    @property
    def least_samples(self) -> int:
        """Samples of the smallest step of an epoch, over all ranks; 0 if it is not known."""
        return self.epoch_samples % self.plan.global_batch or self.plan.global_batch

    @property
    def is_even(self) -> bool:
        """Whether the slices of each step, including the last one, have the same number of samples."""
        return self.plan.is_even and self.epoch_samples % self.plan.global_batch % self.plan.slices == 0

    def weight(self, step: int, micro: int) -> float:
        """Return the weight of a slice's mean in the mean over its global batch; 1.0 for an even split."""
        begin, end = self._bounds(step, micro)
        return (end - begin) * self.plan.slices / self.step_samples(step)

    def step_samples(self, step: int) -> int:
        """Return the number of samples of a step, over all ranks; the last one may be less than a global batch."""
        return min(self.plan.global_batch, self.samples - step % self.own_steps * self.plan.global_batch)

    def samples_before(self, steps: int, epoch: int) -> int:
        """Return the number of samples of the first steps of an epoch, over all ranks.

        Next to a longer loader that runs unchanged, they are those of several passes, which consist of whole steps.
        """
        samples = steps * self.plan.global_batch
        return samples if self.steps > self.own_steps else min(samples, self.epoch_samples)

    def _pass_key(self, epoch: int, cycle: int) -> int:
        """Return the number that seeds a pass's order and randomness; the epoch for the first loader's first pass."""
        return epoch if self.index == cycle == 0 else mix(epoch, cycle, self.index)

    def _chosen(self, order: Any, step: int, micro: int) -> list[Any]:
        begin, end = self._bounds(step, micro)
        chosen = order[begin : max(end, begin + 1)]  # an empty slice still reads one sample, at weight 0
        return chosen.tolist() if hasattr(chosen, "tolist") else list(chosen)

    def _bounds(self, step: int, micro: int) -> tuple[int, int]:
        slices = self.plan.slices
        index = micro * self.plan.replicas + self.rank
        samples, begin = self.step_samples(step), self._begin(step)
        return begin + samples * index // slices, begin + samples * (index + 1) // slices

    def _begin(self, step: int) -> int:
        """Return the place of a step's first sample in the order of its pass."""
        return step % self.own_steps * self.plan.global_batch


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler of a map-style loader, as on one device.

    It is read from the batch sampler, because torch stores the sampler of a user's BatchSampler only there. A sampler
    that splits the samples by rank is replaced by a copy that yields all of them; `epoch_order` handles
    DistributedSampler.
    """
    sampler = unwrapped(loader.batch_sampler).sampler
    return sampler if type(sampler) is DistributedSampler else undivided(sampler, loader.dataset)


def unwrapped(batch_sampler: Any) -> Any:
    """Return the batch sampler inside the wrapper that Lightning adds for prediction."""
    return getattr(batch_sampler, "_batch_sampler", batch_sampler)


def samples_of(sampler: Any, dataset: Any) -> int:
    """Return the number of samples of an epoch over all ranks; a DistributedSampler's length is one rank's share."""
    return len(dataset) if type(sampler) is DistributedSampler else len(sampler)


def epoch_order(sampler: Any, samples: int, seed: int, epoch: int, is_first: bool = True) -> Sequence[Any]:
    """Return the sample indices that a sampler draws in a pass, the same on every rank.

    Args:
        sampler: any sampler; for a DistributedSampler, only whether it shuffles matters.
        samples: number of samples of a pass, over all ranks.
        seed: seed of the pass.
        epoch: passed to the sampler's `set_epoch`.
        is_first: see `draw`.

    Raises:
        Refused: the sampler draws another number of samples than its `len()`.
    """
    if (order := _order_of_torch(sampler, samples, seed)) is not None:
        return order
    drawn = draw(sampler, samples, seed, epoch, is_first)
    if len(drawn) != samples:
        found = "more" if len(drawn) > samples else len(drawn)
        raise Refused(
            f"the sampler {type(sampler).__name__} draws {found} samples, but its len() was {samples} when training "
            "began; correct its __len__, and keep it the same in all epochs"
        )
    return drawn


def draw(sampler: Any, most: int, seed: int, epoch: int, is_first: bool, of_batches: bool = False) -> list[Any]:
    """Return what a sampler draws under a seed, and at most one item more than ``most``, because it may never end.

    Args:
        epoch: passed to `set_epoch` of the sampler and, as Lightning does, of a sampler inside.
        is_first: draw twice, and report a sampler that draws others the second time.
        of_batches: the items are batches, which become lists.
    """
    drawn = _draw(sampler, most, seed, epoch, of_batches)
    if is_first and not type(sampler).__module__.startswith("torch.utils.data"):  # torch's keep only a generator
        again = _draw(sampler, most, seed, epoch, of_batches)
        if str(again[:_COMPARED_SAMPLES]) != str(drawn[:_COMPARED_SAMPLES]):
            _report_state(sampler)
    return drawn


def _draw(sampler: Any, most: int, seed: int, epoch: int, of_batches: bool) -> list[Any]:
    for one in (sampler, getattr(sampler, "sampler", None)):
        if callable(set_epoch := getattr(one, "set_epoch", None)):
            set_epoch(epoch)
    seed_own(own_generators(sampler), seed)
    with torch.random.fork_rng(devices=[]):
        seed_generators(seed)
        drawn = islice(sampler, most + 1)
        # a batch becomes a list before the next one is drawn: a batch sampler may fill one buffer again and again
        return [one.tolist() if hasattr(one, "tolist") else list(one) for one in drawn] if of_batches else list(drawn)


@rank_zero_only
def _report_state(sampler: Any) -> None:
    log.warning(
        "the sampler %s keeps state: iterated again under the same seed and epoch, it draws other samples, so a "
        "resumed run may read others than one without interruption; let its __iter__ depend only on set_epoch(epoch) "
        "and on random numbers, of torch, NumPy, Python or a generator that it keeps",
        type(sampler).__name__,
    )


def _order_of_torch(sampler: Any, samples: int, seed: int) -> Sequence[Any] | None:
    """Return the order of a sampler that torch makes for a loader, without drawing from it; None for another one."""
    generator = torch.Generator().manual_seed(seed >> 1)
    if type(sampler) is DistributedSampler:  # its share has another size; only whether it shuffles matters
        return _permutation(samples, generator) if sampler.shuffle else range(samples)
    if type(sampler) is SequentialSampler:
        return range(samples)
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler.data_source) == samples:
        return _permutation(samples, generator)
    return None


def digest(order: Sequence[Any], dataset: Any) -> int:
    """Return a digest of the samples that an order begins with: their places in what a Subset was taken from."""
    keys = list(order[:_COMPARED_SAMPLES])
    while isinstance(dataset, Subset) and all(isinstance(key, Integral | torch.Tensor) for key in keys):
        keys, dataset = [dataset.indices[int(key)] for key in keys], dataset.dataset
    return zlib.crc32(" ".join(str(key) for key in keys if isinstance(key, _COMPARED_KEYS)).encode())


def check_shared(samples: int, replicas: int) -> None:
    """Check that each rank gets a sample of an evaluation set.

    Raises:
        Refused: there are too few.
    """
    if samples < replicas:
        raise Refused(
            f"an evaluation reads {samples} samples of a set, which {replicas} devices can't share; use fewer devices, "
            "or leave out a limit of the evaluation"
        )


def splits_by_rank(sampler: Any) -> bool:
    """Return whether a sampler has the attributes by which torch's DistributedSampler splits its samples."""
    return getattr(sampler, "num_replicas", None) is not None and hasattr(sampler, "rank")


def undivided(sampler: Any, dataset: Any, forms_batches: bool = False) -> Any:
    """Return a sampler that yields the samples of all ranks: a copy, if the given one splits them by rank.

    Args:
        forms_batches: it is a batch sampler, whose padding is its own.
    """
    if not splits_by_rank(sampler):
        return sampler
    replicas = sampler.num_replicas
    undivided = copy.copy(sampler)
    undivided.num_replicas, undivided.rank = 1, 0
    if hasattr(sampler, "total_size"):
        padding = abs(sampler.total_size - len(dataset))  # or what drop_last omits, for shares of equal size
        is_padded = padding < replicas and not forms_batches
        undivided.num_samples = undivided.total_size = len(dataset) if is_padded else sampler.total_size
    return undivided


def _permutation(samples: int, generator: torch.Generator) -> Sequence[int]:
    # an array, because ten million Python ints take 1.5 s and 400 MB
    return torch.randperm(samples, generator=generator).numpy()  # type: ignore[return-value]  # acts as a Sequence
