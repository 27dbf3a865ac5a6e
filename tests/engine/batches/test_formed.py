"""Batch samplers: each batch that they form is the global batch of a step, of which each device reads a slice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from lightswitch.batches.loaders import Combined, evaluation_loader, training_loader
from lightswitch.batches.plan import BatchPlan, RankShare
from lightswitch.errors import Refused
from tests.engine.fits import PLAIN, Fits
from tests.engine.plain import Buckets, PlainData, Points
from tests.pool import RankFailed

SIZES = [3, 7, 1, 12, 5, 2, 8, 12]  # of batches
DATA = TensorDataset(torch.arange(sum(SIZES)))
PLANS = [
    BatchPlan(12, 12 // slices, replicas, slices // replicas) for replicas, slices in ((1, 1), (2, 2), (2, 4), (4, 4))
]


class Formed(Sampler):
    """Shuffles its batches by Python's generator."""

    def __init__(self) -> None:
        ends = [sum(SIZES[: at + 1]) for at in range(len(SIZES))]
        self.batches = [list(range(end - size, end)) for end, size in zip(ends, SIZES, strict=True)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(random.sample(self.batches, len(self.batches)))


def read(
    sampler: Any, plan: BatchPlan, epoch: int = 0, first: int = 0, seed: int = 5, dataset: Dataset = DATA
) -> list[list[int]]:
    """Return the samples of each step, over all ranks, in the order in which one process reads them."""
    loader = DataLoader(dataset, batch_sampler=sampler)
    ranks = [training_loader(loader, RankShare(plan, rank, seed)) for rank in range(plan.replicas)]
    for rank in ranks:
        rank.batch_sampler.start_at(epoch, first)
        rank.batch_sampler.set_epoch(epoch)
    of_ranks = [iter(rank) for rank in ranks]
    assert len({len(rank) for rank in ranks}) == 1
    steps = []
    for step in range(first, len(ranks[0]) // plan.accumulation):
        slices = [
            next(loader)[0][: None if rank.batch_sampler.weight_and_samples(step, micro)[0] else 0]
            for micro in range(plan.accumulation)
            for rank, loader in zip(ranks, of_ranks, strict=True)
        ]
        steps.append(torch.cat(slices).tolist())
        weights = [
            rank.batch_sampler.weight_and_samples(step, micro)[0]
            for rank in ranks
            for micro in range(plan.accumulation)
        ]
        assert sum(weights) == pytest.approx(plan.slices)
    assert all(next(one, None) is None for one in of_ranks)
    return steps


def test_each_device_reads_its_slice_of_each_batch() -> None:
    alone, *others = [read(Formed(), plan) for plan in PLANS]
    assert sorted(map(len, alone)) == sorted(SIZES)
    assert [other for other in others if other != alone] == []
    assert read(Formed(), PLANS[0], epoch=1) != alone


def test_a_resume_reads_the_batches_that_are_left() -> None:
    whole = [read(Formed(), PLANS[0], epoch) for epoch in range(3)]
    assert read(Formed(), PLANS[2], 2, first=3) == whole[2][3:]
    assert whole[0] != whole[1] != whole[2]
    assert [sorted(chain(*epoch)) for epoch in whole] == [[*range(50)]] * 3


def test_the_samples_of_steps_are_counted_as_they_are() -> None:
    slices = training_loader(DataLoader(DATA, batch_sampler=Formed()), RankShare(PLANS[1], 0, 5)).batch_sampler
    sizes = [len(step) for step in read(Formed(), PLANS[0])]
    assert [slices.samples_before(step, 0) for step in range(9)] == [sum(sizes[:step]) for step in range(9)]
    assert (slices.epoch_samples, slices.samples) == (50, 50)


class Changing(Formed):
    """Tells another length than it has."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def __len__(self) -> int:
        return self.steps


def test_an_epoch_has_as_many_steps_as_it_has_told() -> None:
    assert len(read(Changing(5), PLANS[1])) == 5
    longer = read(Changing(10), PLANS[1])
    assert longer[8:] == longer[:2]


def test_a_batch_sampler_without_samples_is_refused() -> None:
    sampler = Formed()
    sampler.batches = [[1], []]
    with pytest.raises(Refused, match="the batch sampler Formed forms a batch without samples"):
        read(sampler, PLANS[0])


def test_batches_of_one_of_several_loaders_are_not_cut() -> None:
    combined = Combined()
    for loader in (DataLoader(DATA, batch_sampler=Buckets([1.0] * 48, 3.0)), DataLoader(DATA, 4, drop_last=True)):
        training_loader(loader, RankShare(PLANS[1], 0, 5), combined)
    with pytest.raises(Refused, match="which does not divide over 2 devices × accumulation 1; use global_batch_size="):
        combined.check()


@pytest.mark.parametrize(("replicas", "batches"), [(1, 8), (2, 8), (3, 9), (8, 8), (11, 11)])
def test_an_evaluation_reads_each_sample_once_in_batches_that_are_cut_if_they_must(replicas: int, batches: int) -> None:
    loader = DataLoader(DATA, batch_sampler=Formed())
    plan = BatchPlan(62, 2, replicas, 1)
    ranks = [evaluation_loader(loader, RankShare(plan, rank, seed=5)) for rank in range(replicas)]
    assert {len(rank) for rank in ranks} == {batches // replicas} == {len([*rank]) for rank in ranks}
    read = [batch.tolist() for rank in ranks for (batch,) in rank]
    assert sorted(chain(*read)) == [*range(50)]
    assert sum(batch in read for batch in Formed().batches) >= 8 - (batches - 8)


class OfRank(Formed):
    """Splits the batches itself, by what no one else can see."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.batches = self.batches[rank::2]


class OfRankData(PlainData):
    def __init__(self, stage: str) -> None:
        super().__init__(samples=50)
        self.stage = stage

    def train_dataloader(self) -> DataLoader:
        return self._split(Points(50)) if self.stage == "training" else super().train_dataloader()

    def val_dataloader(self) -> DataLoader:
        return self._split(Points(50)) if self.stage == "evaluation" else super().val_dataloader()

    def _split(self, points: Points) -> DataLoader:
        return DataLoader(points, batch_sampler=OfRank(torch.distributed.get_rank()))


@pytest.mark.parametrize("stage", ["training", "evaluation"])
def test_a_batch_sampler_that_splits_by_rank_is_refused(stage: str, fits: Fits) -> None:
    with pytest.raises(RankFailed) as failed:
        fits(replace(PLAIN, data=partial(OfRankData, stage), strategy="ddp"), 2)
    line = str(failed.value.error)
    assert line.startswith(
        f"the ranks draw different samples of {'a training' if stage == 'training' else 'an evaluation'} set "
    )
    assert line.endswith("; if its batch sampler splits them by rank, type data.sharded_by=dataset")


class Reused(Sampler):
    """Fills one list again and again, and draws while its batches are read."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        batch: list[int] = []
        for start in range(0, 16, 4):
            batch[:] = range(start, start + 4)
            yield batch
        yield (int(torch.randint(50, ())) for _ in range(4))


def test_a_batch_is_taken_before_the_next_one_is_drawn() -> None:
    first = read(Reused(), PLANS[1])
    assert first[:4] == [[*range(start, start + 4)] for start in range(0, 16, 4)]
    torch.manual_seed(1)
    assert read(Reused(), PLANS[1]) == first
