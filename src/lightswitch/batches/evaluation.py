"""Samples that a rank reads in an evaluation: its share of the set, each sample once over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DistributedSampler, Sampler, SequentialSampler

from lightswitch.batches.generators import mix
from lightswitch.batches.order import check_shared, digest, epoch_order, unwrapped
from lightswitch.batches.plan import pieces
from lightswitch.batches.rank_loader import RankLoader


class EvaluationBatches(Sampler[Any]):
    """Batch sampler of one rank in an evaluation.

    All ranks make the same number of batches, because forward passes of sharded strategies are collective.

    Args:
        order: the samples of all ranks.
        batches: those of this rank.
        batch_size: maximum number of samples in a batch.
        sizes: of the first batches of all ranks, if the loader forms them.
    """

    def __init__(
        self, order: Sequence[Any], batches: list[Sequence[Any]], batch_size: int, sizes: Sequence[int] = ()
    ) -> None:
        self._order, self._batches, self._sizes = order, batches, sizes
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Any]]:
        return map(list, self._batches)

    def samples_in(self, batch_idx: int) -> int:
        """Return the number of samples of a batch."""
        return len(self._batches[batch_idx])

    def digest(self, dataset: Any) -> int:
        """Return a digest, below 2^63, of the batches of all ranks: equal on ranks that draw the same."""
        return mix(digest(self._order, dataset), *self._sizes) >> 1


def shares(sampler: Any, samples: int, batch: int, replicas: int, rank: int, seed: int) -> EvaluationBatches:
    """Return the batches of a contiguous share of the samples, each exactly once over all ranks.

    Shares that differ by one sample are split into as many batches, which differ by one sample.

    Args:
        samples: number of samples, over all ranks.
        batch: maximum number of samples in a batch.
        seed: seed of the order, if the sampler draws one.

    Raises:
        Refused: there are fewer samples than ranks.
    """
    is_in_order = type(sampler) in (SequentialSampler, DistributedSampler)
    order = range(samples) if is_in_order else epoch_order(sampler, samples, mix(seed, 0), 0)
    count = rounds(len(order), -(-len(order) // batch), replicas)
    return EvaluationBatches(order, pieces(pieces(order, replicas)[rank], count), batch)


def rounds(samples: int, batches: int, replicas: int) -> int:
    """Return the number of batches that each rank makes of its share of an evaluation set.

    Args:
        batches: number of batches over all ranks, if none had to be cut or joined.

    Raises:
        Refused: there are fewer samples than ranks.
    """
    check_shared(samples, replicas)
    return min(-(-batches // replicas), samples // replicas)


def samples_in(loaders: Any, dataloader_idx: int, batch_idx: int) -> int | None:
    """Return the number of samples in a batch of one of an evaluation's loaders; None if only the loader knows it."""
    loader = loaders.flattened[dataloader_idx]
    if not isinstance(loader, RankLoader) or loader.makes_batches:
        return None
    slices: Any = loader.sampler if loader.batch_sampler is None else unwrapped(loader.batch_sampler)
    return int(slices.samples_in(batch_idx))
