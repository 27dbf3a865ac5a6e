"""Samples that a rank reads in an evaluation: its share of the set, each sample once over all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DistributedSampler, Sampler, SequentialSampler

from lightswitch.batches.generators import mix
from lightswitch.batches.order import SeededSamples, epoch_order, unwrapped


class Evaluated(Sampler[Any], ABC):
    """Batch sampler of one rank in an evaluation. All ranks make the same number of batches.

    Attributes:
        order: the samples of all ranks.
    """

    order: Sequence[Any]

    @abstractmethod
    def repeats(self, batch_idx: int) -> bool:
        """Return whether a batch is another rank's, because there is none left for this one; see `RepeatedSamples`."""


class EvaluationSlices(Evaluated):
    """Batch sampler of one rank: yields a contiguous share of the samples, each exactly once over all ranks.

    All ranks make the same number of batches, because forward passes of sharded strategies are collective. Therefore
    shares that differ by one sample are split into batches that differ by one sample. If there are fewer samples than
    ranks, the first rank has one, and ranks without a sample repeat one of another rank.

    Args:
        samples: number of samples, over all ranks.
        batch: maximum number of samples in a batch.
        replicas: number of data-parallel ranks.
        seed: seed of the order, if the sampler draws one.
    """

    def __init__(self, sampler: Any, samples: int, batch: int, replicas: int, rank: int, seed: int) -> None:
        self.base = sampler
        is_in_order = type(sampler) in (SequentialSampler, DistributedSampler)
        self.order = range(samples) if is_in_order else epoch_order(sampler, samples, seed, 0)
        self.begin, self.end = samples * rank // replicas, samples * (rank + 1) // replicas
        if samples < replicas:
            self.begin, self.end = -(-samples * rank // replicas), -(-samples * (rank + 1) // replicas)
        self._repeats = self.begin == self.end
        self.end += self._repeats
        self.begin, self.end = min(self.begin, samples - 1), min(self.end, samples)
        self.batches = max(1, min(-(-samples // (replicas * batch)), samples // replicas))
        self.batch_size = batch

    def __len__(self) -> int:
        return self.batches

    def repeats(self, batch_idx: int) -> bool:
        return self._repeats

    def __iter__(self) -> Iterator[list[Any]]:
        share = self.order[self.begin : self.end]
        for index in range(self.batches):
            yield list(share[len(share) * index // self.batches : len(share) * (index + 1) // self.batches])


def repeats(loaders: Any, dataloader_idx: int, batch_idx: int) -> bool:
    """Return whether a batch of one of an evaluation's loaders consists of samples that another rank reads, too."""
    slices = unwrapped(getattr(loaders.flattened[dataloader_idx], "batch_sampler", None))
    return isinstance(slices, Evaluated) and slices.repeats(batch_idx)


class EvaluatedSamples(SeededSamples):
    """Map-style dataset whose samples are the same in each evaluation, even if they are drawn at random."""

    def __getitems__(self, indices: Any) -> Any:
        return self._read(0, [_number(index) for index in indices], indices)


def _number(index: Any) -> int:
    """Return an integer for an index; a sampler may yield any key that the dataset accepts."""
    return index if isinstance(index, int) else mix(*str(index).encode())
