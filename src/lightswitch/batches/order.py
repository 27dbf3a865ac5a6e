"""Samples that a rank reads, and their order, as functions of (seed, epoch, step) alone.

A resumed run reads the same samples as an uninterrupted one, at any number of devices.
"""

from __future__ import annotations

import copy
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, cycle, islice
from numbers import Integral
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)

from lightswitch.batches.plan import RankShare, pieces
from lightswitch.batches.seeds import StandIn, mix, own_generators, seed_generators, seed_own
from lightswitch.errors import Refused

log = logging.getLogger(__name__)
_COMPARED_SAMPLES = 1000  # of a pass, from its start
_MOST_DRAWN = 2**26  # samples whose order is held in memory: 0.5 GB for each rank
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
        combined: the training loaders of the run (`lightswitch.batches.loaders.Combined`); None for this one alone.
        dataset: the loader's dataset, if the sampler draws from one.

    Attributes:
        is_formed: the sampler makes the sizes of steps, in place of the plan.
        is_sized: the number of steps is known before an epoch ends.
    """

    is_formed = False
    is_sized = True

    def __init__(
        self, share: RankShare, sampler: Any, samples: int, drop_last: bool, combined: Any = None, dataset: Any = None
    ) -> None:
        self._last: tuple[int, Sequence[Any]] | None = None  # the pass drawn last, by `_pass_key`, and its order
        self._dataset = dataset
        self._split = digest(range(min(_COMPARED_SAMPLES, sized_len(dataset) or 0)), dataset)
        self._begins: dict[str, int] = {}  # digests of the dataset's first samples, and of those of the current pass
        self.samples = samples
        self.share, self.plan = share, share.plan
        self.start_at(0, 0)
        size = share.plan.global_batch
        self.own_steps = samples // size if drop_last else -(-samples // size)
        self.batch_size = share.plan.micro_batch  # DeepSpeed reads it
        self._combined = combined
        self.index = 0 if combined is None else combined.add(self)
        self.given = sampler

    @property
    def steps(self) -> int:
        """Optimizer steps of an epoch."""
        steps: int = self.own_steps if self._combined is None else self._combined.steps_of(self.own_steps)
        return steps

    def __len__(self) -> int:
        if not (self.is_sized if self._combined is None else self._combined.is_sized):
            # Lightning then prefetches a batch, to find the epoch's last one
            raise TypeError("the length of an epoch is unknown, because it ends when a stream ends")
        return self.steps * self.plan.accumulation

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order the next iterator yields. Lightning calls this method."""
        self.epoch = epoch

    def start_at(self, epoch: int, step: int, state: Mapping[str, Any] | None = None) -> None:
        """Set the epoch, and the number of its steps, at which the run begins; called before the first batch.

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

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that epoch and step are read when the first batch is requested: with workers,
        # DataLoader makes two iterators and uses one.
        epoch, at_cycle = self.epoch, -1
        for step in range(self._first_step(), self.steps):
            if step // self.own_steps != at_cycle:
                at_cycle = step // self.own_steps
                key, order = self._pass_key(epoch, at_cycle), self._order(epoch, at_cycle)
                self._compare(str(key), digest(order, self._dataset))
            for micro in range(self.plan.accumulation):
                begin, end = self._bounds(step, micro)
                yield key, begin, _chosen(order, begin, end)

    def _compare(self, of_pass: str, digest: int) -> None:
        """Warn if a pass begins with other samples than in the run that is resumed."""
        begins = {_SPLIT: self._split, of_pass: digest}
        if any(self._begins.get(key, begin) != begin for key, begin in begins.items()) and self.share.rank == 0:
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
        return _chosen(self._order(self.epoch, step // self.own_steps), *self._bounds(step, micro))

    def _order(self, epoch: int, cycle: int) -> Sequence[Any]:
        key = self._pass_key(epoch, cycle)
        if self._last is None or self._last[0] != key:
            is_first = self._last is None
            self._last = key, self._drawn(key, self._told_epoch(epoch, cycle), is_first)
        return self._last[1]

    def _drawn(self, key: int, epoch: int, is_first: bool) -> Sequence[Any]:
        return epoch_order(self.given, self.samples, mix(self.share.seed, key), epoch, is_first)

    def _pass_key(self, epoch: int, cycle: int) -> int:
        """Return the number that seeds a pass's order and randomness; the epoch for the first loader's first pass."""
        return epoch if self.index == cycle == 0 else mix(epoch, cycle, self.index)

    @staticmethod
    def _told_epoch(epoch: int, cycle: int) -> int:
        """Return the epoch for `set_epoch` in a pass over the samples, in 31 bits: some samplers accept no more."""
        return epoch if cycle == 0 else mix(epoch, cycle) >> 33

    def _bounds(self, step: int, micro: int) -> tuple[int, int]:
        first, last = self._step_bounds(step)
        begin, end = self.share.slice_of(last - first, micro)
        return first + begin, first + end

    def weight_and_samples(self, step: int, micro: int) -> tuple[float, int]:
        """Return the weight of a slice's mean in the mean over its global batch, and the slice's number of samples.

        The weight is 1.0 for an even split.
        """
        first, last = self._step_bounds(step)
        begin, end = self.share.slice_of(last - first, micro)
        return (end - begin) * self.plan.slices / (last - first), end - begin

    def _step_bounds(self, step: int) -> tuple[int, int]:
        """Return the begin and end of a step's samples in the order of its pass; the last step may be smaller."""
        cycle, of_pass = divmod(step, self.own_steps)
        return self._before(self.epoch, cycle, of_pass), self._before(self.epoch, cycle, of_pass + 1)

    def _before(self, epoch: int, cycle: int, steps: int) -> int:
        """Return the number of samples of the first steps of a pass, over all ranks."""
        return min(steps * self.plan.global_batch, self.samples)

    def samples_before(self, steps: int, epoch: int) -> int:
        """Return the number of samples of the first steps of an epoch, which may have several passes."""
        passes, rest = divmod(steps, max(1, self.own_steps))  # a stream may be empty
        whole = sum(self._before(epoch, cycle, self.own_steps) for cycle in range(passes))
        return whole + self._before(epoch, passes, rest) if rest else whole

    @property
    def epoch_samples(self) -> int:
        """Samples of one pass, over all ranks, without those that drop_last omits."""
        return self._before(self.epoch, 0, self.own_steps)

    @property
    def is_even(self) -> bool:
        """Whether the slices of each step, including the last one, have the same number of samples."""
        return self.plan.is_even and self.epoch_samples % self.plan.global_batch % self.plan.slices == 0


def _chosen(order: Any, begin: int, end: int) -> list[Any]:
    chosen = order[begin : max(end, begin + 1)]  # an empty slice still reads one sample, at weight 0
    return chosen.tolist() if hasattr(chosen, "tolist") else list(chosen)


class FormedSlices(TrainingSlices):
    """Batch sampler of one rank: yields its slices of the batches that the user's batch sampler forms.

    Step k takes the k-th batch, of any size, in as many slices as the plan has. An epoch has as many steps as the batch
    sampler's `len()` says when training begins, as under Lightning; where it forms fewer, the first ones come again.

    Raises:
        Refused: there are no batches, or one has no samples.
    """

    is_formed = True

    def __init__(self, share: RankShare, sampler: Any, combined: Any, dataset: Any) -> None:
        self._bounds_of_passes: dict[int, list[int]] = {}  # where steps begin and the last one ends, by `_pass_key`
        super().__init__(share, sampler, len(sampler), False, combined, dataset)
        self.own_steps, self.samples = len(sampler), sized_len(dataset) or len(sampler)

    def _drawn(self, key: int, epoch: int, is_first: bool) -> Sequence[Any]:
        formed = formed_batches(self.given, self.own_steps, mix(self.share.seed, key), epoch, is_first)
        batches = [*islice(cycle(formed), self.own_steps)]
        self._bounds_of_passes[key] = [*accumulate(map(len, batches), initial=0)]
        return [*chain.from_iterable(batches)]

    def _before(self, epoch: int, cycle: int, steps: int) -> int:
        key = self._pass_key(epoch, cycle)
        if key not in self._bounds_of_passes:
            self._order(epoch, cycle)
        return self._bounds_of_passes[key][steps]

    @property
    def is_even(self) -> bool:
        return self.plan.slices == 1  # batches may have any size


class EvaluationBatches(Sampler[Any]):
    """Batch sampler of one rank in an evaluation: its share of the set, each sample once over all ranks.

    All ranks make the same number of batches, because forward passes of sharded strategies are collective. A rank reads
    a contiguous share of the samples, in batches that differ by one; of those that a batch sampler forms, each n-th one
    for n ranks, of which the largest are cut in two if their number does not divide.

    Args:
        loader: a map-style loader.

    Raises:
        Refused: there are no samples, or fewer than ranks.
    """

    def __init__(self, loader: DataLoader[Any], share: RankShare) -> None:
        plan, seed = share.plan, mix(share.seed, 0)
        if forms_batches(loader):
            formed = unwrapped(loader.batch_sampler)
            batches = formed_batches(formed, len(formed), seed, 0, is_first=True)
            self._order: Sequence[Any] = [*chain.from_iterable(batches)]
            check_shared(len(self._order), plan.replicas)
            while len(batches) % plan.replicas:
                at = max(range(len(batches)), key=lambda index: len(batches[index]))
                half = len(batches[at]) // 2
                if not half:  # all are single samples
                    batches = [[*one] for one in pieces(self._order, len(batches) // plan.replicas * plan.replicas)]
                    break
                batches[at : at + 1] = [batches[at][:half], batches[at][half:]]
            self._batches: list[Sequence[Any]] = [*batches[share.rank :: plan.replicas]]
            self.batch_size = max(map(len, batches))
            return
        sampler = sampler_of(loader)
        samples = len(sampler)
        if not samples:
            raise Refused("an evaluation set has no samples; leave its loader out")
        check_shared(samples, plan.replicas)
        is_in_order = type(sampler) in (SequentialSampler, DistributedSampler)
        self._order = range(samples) if is_in_order else epoch_order(sampler, samples, seed, 0)
        self.batch_size = min(unwrapped(loader.batch_sampler).batch_size, plan.micro_batch)
        count = min(-(-samples // (self.batch_size * plan.replicas)), samples // plan.replicas)
        self._batches = pieces(pieces(self._order, plan.replicas)[share.rank], count)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Any]]:
        return map(list, self._batches)

    def samples_in(self, batch_idx: int) -> int:
        """Return the number of samples of a batch."""
        return len(self._batches[batch_idx])

    def digest(self, dataset: Any) -> int:
        """Return a digest of the samples of all ranks: equal on ranks that draw the same."""
        return digest(self._order, dataset)


def check_shared(samples: int, replicas: int) -> None:
    """Check that each rank gets a sample of an evaluation set.

    Raises:
        Refused: there are too few.
    """
    if samples < replicas:
        raise Refused(
            f"an evaluation reads {samples} samples of a set, which {replicas} devices can't share; use fewer devices"
        )


def forms_batches(loader: DataLoader[Any]) -> bool:
    """Return whether a batch sampler chooses what a batch consists of; torch's only groups samples."""
    return type(unwrapped(loader.batch_sampler)) is not BatchSampler


def unwrapped(batch_sampler: Any) -> Any:
    """Return the batch sampler inside the wrapper that Lightning adds for prediction."""
    return getattr(batch_sampler, "_batch_sampler", batch_sampler)


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler of a map-style loader, as on one device: a DistributedSampler becomes a copy for all ranks.

    It is read from the batch sampler, because torch stores the sampler of a user's BatchSampler only there.
    """
    sampler = unwrapped(loader.batch_sampler).sampler
    if isinstance(sampler, DistributedSampler):
        sampler = copy.copy(sampler)
        sampler.num_replicas, sampler.rank = 1, 0
        sampler.num_samples = sampler.total_size = sized_len(loader.dataset) or 0
    return sampler


def epoch_order(sampler: Any, samples: int, seed: int, epoch: int, is_first: bool = True) -> Sequence[Any]:
    """Return the sample indices that a sampler draws in a pass, the same on every rank.

    Args:
        sampler: any sampler; for a DistributedSampler, only whether it shuffles matters.
        samples: number of samples of a pass, over all ranks.
        seed: seed of the pass.
        epoch: passed to the sampler's `set_epoch`.
        is_first: see `_draw`.

    Raises:
        Refused: the sampler draws another number of samples than its `len()`.
    """
    if (order := _order_of_torch(sampler, samples, seed)) is not None:
        return order
    drawn = _draw(sampler, samples, seed, epoch, is_first)
    if len(drawn) != samples:
        found = "more" if len(drawn) > samples else len(drawn)
        raise Refused(
            f"the sampler {type(sampler).__name__} draws {found} samples, but its len() was {samples} when training "
            "began; correct its __len__, and keep it the same in all epochs"
        )
    return drawn


def formed_batches(sampler: Any, count: int, seed: int, epoch: int, is_first: bool) -> list[list[Any]]:
    """Return the batches that a batch sampler for all ranks forms in a pass, at most ``count``.

    Raises:
        Refused: there are none, or one has no samples.
    """
    batches = _draw(sampler, count, seed, epoch, is_first, of_batches=True)
    if not all(batches) or not batches:
        kind = type(sampler).__name__
        raise Refused(f"the batch sampler {kind} forms {'a batch without samples' if batches else 'no batches'}")
    return batches[:count]


def _order_of_torch(sampler: Any, samples: int, seed: int) -> Sequence[Any] | None:
    """Return the order of a sampler that torch makes for a loader, without drawing from it; None for another one."""
    shuffles_all = (
        type(sampler) is RandomSampler and not sampler.replacement and len(sampler.data_source) == samples
    ) or (type(sampler) is DistributedSampler and sampler.shuffle)
    if shuffles_all and samples > _MOST_DRAWN:
        return Permutation(samples, seed)
    if shuffles_all:  # an array, because ten million Python ints take 1.5 s and 400 MB
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed >> 1))
        return order.numpy()  # type: ignore[return-value]  # acts as a Sequence
    return range(samples) if type(sampler) in (SequentialSampler, DistributedSampler) else None


class Permutation(Sequence[int]):
    """Pseudorandom permutation of ``range(samples)``, of which a slice is computed when it is read.

    A Feistel network permutes a power of four; a number outside of the range is permuted again until it is inside
    (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
    """

    ROUNDS = 6

    def __init__(self, samples: int, seed: int) -> None:
        self._samples = samples
        self._half_bits = np.uint64((samples.bit_length() + 1) // 2)
        self._keys = np.array([mix(seed, number) for number in range(self.ROUNDS)], dtype=np.uint64)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, at: Any) -> Any:
        if not isinstance(at, slice):
            return int(self[at : at + 1][0])
        found = self._permuted(np.arange(*at.indices(self._samples), dtype=np.uint64))
        while (outside := found >= self._samples).any():
            found[outside] = self._permuted(found[outside])
        return found.astype(np.int64)

    def _permuted(self, numbers: Any) -> Any:
        half = np.uint64(2 ** int(self._half_bits) - 1)
        left, right = numbers >> self._half_bits, numbers & half
        for key in self._keys:
            mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & half)
        return left << self._half_bits | right


def _draw(sampler: Any, most: int, seed: int, epoch: int, is_first: bool, of_batches: bool = False) -> list[Any]:
    """Return what a sampler draws under a seed, and at most one item more than ``most``, because it may never end.

    Args:
        epoch: passed to `set_epoch` of the sampler and, as Lightning does, of a sampler inside.
        is_first: draw twice, and report a sampler that draws others the second time.
        of_batches: the items are batches, which become lists.
    """
    for one in (sampler, getattr(sampler, "sampler", None)):
        if callable(set_epoch := getattr(one, "set_epoch", None)):
            set_epoch(epoch)
    seed_own(own_generators(sampler), seed)
    with torch.random.fork_rng(devices=[]):
        seed_generators(seed)
        drawing = islice(sampler, most + 1)
        # a batch becomes a list before the next one is drawn: a batch sampler may fill one buffer again and again
        drawn = [one.tolist() if hasattr(one, "tolist") else list(one) for one in drawing] if of_batches else [*drawing]
    if is_first and not type(sampler).__module__.startswith("torch.utils.data"):  # torch's keep only a generator
        again = _draw(sampler, most, seed, epoch, False, of_batches)
        if str(again[:_COMPARED_SAMPLES]) != str(drawn[:_COMPARED_SAMPLES]):
            _report_state(sampler)
    return drawn


@rank_zero_only
def _report_state(sampler: Any) -> None:
    log.warning(
        "the sampler %s keeps state: iterated again under the same seed and epoch, it draws other samples, so a "
        "resumed run may read others than one without interruption; let its __iter__ depend only on set_epoch(epoch) "
        "and on random numbers, of torch, NumPy, Python or a generator that it keeps",
        type(sampler).__name__,
    )


def digest(order: Sequence[Any], dataset: Any) -> int:
    """Return a digest of the samples that an order begins with: their places in what a Subset was taken from."""
    keys = list(order[:_COMPARED_SAMPLES])
    while isinstance(dataset, Subset) and all(isinstance(key, Integral | torch.Tensor) for key in keys):
        keys, dataset = [dataset.indices[int(key)] for key in keys], dataset.dataset
    return zlib.crc32(" ".join(str(key) for key in keys if isinstance(key, _COMPARED_KEYS)).encode())
