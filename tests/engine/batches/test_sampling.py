"""Samplers as people write them: the samples and the order that they draw, for all devices together."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightswitch.batches.loaders import evaluation_loader, training_loader
from lightswitch.batches.plan import BatchPlan, Position
from lightswitch.errors import Refused

DATA = TensorDataset(torch.arange(50))
PLAN = BatchPlan(global_batch=12, micro_batch=6, replicas=2, accumulation=1)


class OwnSampler(Sampler[int]):
    """Draws a permutation by a generator that it keeps."""

    def __init__(self, generator: Any) -> None:
        self.rng = generator

    def __len__(self) -> int:
        return 50

    def __iter__(self) -> Iterator[int]:
        if isinstance(self.rng, torch.Generator):
            return iter(torch.randperm(50, generator=self.rng).tolist())
        if isinstance(self.rng, random.Random):
            return iter(self.rng.sample(range(50), 50))
        return iter(self.rng.permutation(50).tolist())


class EpochSampler(Sampler[int]):
    """Shuffles by the epoch that it is told, as torch's does."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 50

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(50, generator=torch.Generator().manual_seed(7 + self.epoch)).tolist())


class Weighted(DistributedSampler):
    """Deals out draws by weight, of the first five samples alone."""

    def __iter__(self) -> Iterator[int]:
        weights = torch.tensor([1.0] * 5 + [0.0] * 45)
        drawn = torch.multinomial(weights, self.total_size, True, generator=torch.Generator().manual_seed(self.epoch))
        return iter(drawn[self.rank : self.total_size : self.num_replicas].tolist())


class Dealing(Sampler[int]):
    """Deals out a permutation by rank, without torch's class."""

    def __init__(self) -> None:
        self.num_replicas, self.rank = 2, 1

    def __len__(self) -> int:
        return 50 // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(50, generator=torch.Generator().manual_seed(3))
        return iter(order[self.rank :: self.num_replicas].tolist())


class WrongLength(EpochSampler):
    def __len__(self) -> int:
        return 60


def trained(loader: DataLoader, epoch: int = 0, at: int = 0) -> list[int]:
    """Return what all ranks read in an epoch, in the order of ranks."""
    ranks = [training_loader(loader, PLAN, rank, seed=1, at=Position(epoch=epoch, step=at)) for rank in range(2)]
    return [index for batches in ranks for (batch,) in batches for index in batch.tolist()]


def evaluated(loader: DataLoader, rank: int | None = None) -> list[int]:
    ranks = range(2) if rank is None else [rank]
    loaders = (evaluation_loader(loader, PLAN, rank, seed=1) for rank in ranks)
    return [index for batches in loaders for (batch,) in batches for index in batch.tolist()]


def test_a_sampler_inside_of_a_batch_sampler_draws() -> None:
    weighted = WeightedRandomSampler([1.0] * 10 + [0.0] * 40, 40)
    drawn = trained(DataLoader(DATA, batch_sampler=BatchSampler(weighted, 4, drop_last=True)))
    assert len(drawn) == 36  # three steps of twelve
    assert set(drawn) <= set(range(10))
    some = DataLoader(DATA, batch_sampler=BatchSampler(SubsetRandomSampler(range(5)), 2, drop_last=False))
    assert sorted(evaluated(some)) == [0, 1, 2, 3, 4]


def test_what_lightning_wraps_for_a_prediction_keeps_sampler_and_batch_size() -> None:
    inner = BatchSampler(SubsetRandomSampler(range(7)), 1, drop_last=False)
    wrapped = DataLoader(DATA, batch_sampler=_IndexBatchSamplerWrapper(inner))
    batches = list(evaluation_loader(wrapped, BatchPlan(6, 6, 1, 1), 0, seed=1))
    assert [len(batch) for (batch,) in batches] == [1] * 7
    assert sorted(int(batch) for (batch,) in batches) == list(range(7))


@pytest.mark.parametrize(
    "generator",
    [np.random.default_rng(), np.random.RandomState(), random.Random(), torch.Generator()],
    ids=lambda generator: type(generator).__name__,
)
def test_a_generator_of_a_samplers_own_follows_seed_and_epoch(generator: Any) -> None:
    """Each process would have another, and a resumed one begins it anew."""
    loader = DataLoader(DATA, 4, sampler=OwnSampler(generator))
    first = trained(loader)
    assert sorted(first) == list(range(50))
    assert trained(loader, epoch=1) != first
    assert trained(loader) == first


def test_a_sampler_is_told_the_epoch() -> None:
    loader = DataLoader(DATA, 4, sampler=EpochSampler())
    assert sorted(trained(loader)) == sorted(trained(loader, epoch=1)) == list(range(50))
    assert trained(loader) != trained(loader, epoch=1)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_sampler_that_deals_out_shares_gives_all_of_them(replicas: int) -> None:
    loader = DataLoader(DATA, 4, sampler=Weighted(DATA, num_replicas=replicas, rank=replicas - 1))
    drawn = trained(loader)
    assert len(drawn) == 50
    assert set(drawn) == set(range(5))
    assert len(evaluated(loader)) == 50
    dealing = DataLoader(DATA, 4, sampler=Dealing())
    assert sorted(trained(dealing)) == sorted(evaluated(dealing)) == list(range(50))
    assert dealing.sampler.num_replicas == 2  # the user's own is left alone


def test_a_sampler_that_draws_another_number_than_it_tells_is_refused() -> None:
    with pytest.raises(Refused, match=r"WrongLength draws 50 samples, but its len\(\) is 60"):
        trained(DataLoader(DATA, 4, sampler=WrongLength()))


def test_a_drawn_order_of_evaluation_is_that_of_each_rank() -> None:
    """Ranks have other random states where loaders are made again in mid-run."""
    loader = DataLoader(DATA, 4, shuffle=True)
    read = []
    for rank in range(2):
        torch.manual_seed(rank)
        read += evaluated(loader, rank)
    assert sorted(read) == list(range(50))


class Noisy(Dataset):
    level = 1.0

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.level * torch.rand(())


def test_the_samples_of_a_subset_are_drawn_each_by_itself() -> None:
    """A split has it: torch's Subset reads batches, and hands them on one by one."""
    whole, split = Noisy(), Subset(Subset(Noisy(), range(50)), range(50))
    read = [torch.cat(list(training_loader(DataLoader(one, 5), PLAN, 0, 1, Position()))) for one in (whole, split)]
    assert torch.equal(*read)


def test_evaluation_reads_the_same_samples_each_time_however_they_are_drawn() -> None:
    shares = [list(evaluation_loader(DataLoader(Noisy(), 5), PLAN, rank, seed=1)) for rank in (0, 1, 0, 1)]
    alone = torch.cat(list(evaluation_loader(DataLoader(Noisy(), 5), BatchPlan(12, 12, 1, 1), 0, seed=1)))
    assert torch.equal(torch.cat([torch.cat(share) for share in shares[:2]]), alone)
    assert torch.equal(torch.cat([torch.cat(share) for share in shares[2:]]), alone)


def test_what_a_hook_sets_on_a_dataset_reaches_it() -> None:
    dataset = Noisy()
    remade = training_loader(DataLoader(dataset, 5), PLAN, 0, 1, Position())
    remade.dataset.level = 0.0
    assert dataset.level == 0.0
    assert remade.dataset[3] == 0
    assert sum(batch.sum() for batch in remade) == 0


class OwnLength(DataLoader):
    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)


def test_a_loader_is_as_long_as_what_it_reads() -> None:
    remade = training_loader(OwnLength(DATA, 4), PLAN, 0, 1, Position())
    assert len(remade) == len(list(remade)) == 5
