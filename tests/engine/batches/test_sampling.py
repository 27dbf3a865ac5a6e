"""Loaders and samplers as people write them: their copies, and what these draw for all devices together."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightswitch.batches.loaders import evaluation_loader, obstacle, training_loader
from lightswitch.batches.plan import BatchPlan, RankShare
from lightswitch.errors import Refused
from tests.engine.conftest import PLAIN_MODEL, Train
from tests.engine.plain import PlainData

DATA = TensorDataset(torch.arange(50))
PLAN = BatchPlan(global_batch=12, micro_batch=6, replicas=2, accumulation=1)
FIRST = RankShare(PLAN, 0, seed=1)


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


class WrongLength(EpochSampler):
    def __len__(self) -> int:
        return 60


class InPlace(Sampler[int]):
    """Shuffles the list that it keeps, which is then the start of the next epoch's."""

    def __init__(self) -> None:
        self.ids = list(range(50))

    def __len__(self) -> int:
        return 50

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.ids)
        return iter(self.ids)


class Nested(InPlace):
    """Holds a sampler with a generator."""

    def __init__(self) -> None:
        self.inner = {"inner": RandomSampler(DATA, generator=torch.Generator().manual_seed(3))}

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner["inner"])


class Weighing(InPlace):
    """Draws a part of the samples, by weights that the module sets."""

    def __init__(self) -> None:
        self.weights = torch.ones(50)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.multinomial(self.weights, 50, replacement=True).tolist())


def epochs(loader: DataLoader, first: int = 0) -> list[list[int]]:
    """Return what a run reads from an epoch on, up to the fourth."""
    made = training_loader(loader, RankShare(BatchPlan(10, 10, 1, 1), 0, seed=1))
    read = []
    for epoch in range(first, 4):
        made.batch_sampler.set_epoch(epoch)
        read.append([index for (batch,) in made for index in batch.tolist()])
    return read


def trained(loader: DataLoader, epoch: int = 0, at: int = 0) -> list[int]:
    """Return what all ranks read in an epoch, in the order of ranks."""
    ranks = [training_loader(loader, RankShare(PLAN, rank, seed=1)) for rank in range(2)]
    for rank in ranks:
        rank.batch_sampler.start_at(epoch, at)
    return [index for batches in ranks for (batch,) in batches for index in batch.tolist()]


def evaluated(loader: DataLoader, rank: int | None = None) -> list[int]:
    ranks = range(2) if rank is None else [rank]
    loaders = (evaluation_loader(loader, RankShare(PLAN, rank, seed=1)) for rank in ranks)
    return [index for batches in loaders for (batch,) in batches for index in batch.tolist()]


def test_a_sampler_inside_of_a_batch_sampler_draws() -> None:
    weighted = WeightedRandomSampler([1.0] * 10 + [0.0] * 40, 40)
    drawn = trained(DataLoader(DATA, batch_sampler=BatchSampler(weighted, 4, drop_last=True)))
    assert len(drawn) == 36  # three steps of twelve
    assert set(drawn) <= set(range(10))
    some = DataLoader(DATA, batch_sampler=BatchSampler(SubsetRandomSampler(range(5)), 2, drop_last=False))
    assert sorted(evaluated(some)) == [0, 1, 2, 3, 4]


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


@pytest.mark.parametrize("kind", [Nested, Weighing, EpochSampler])
def test_a_resumed_run_reads_what_a_sampler_draws_by_seed_and_epoch(
    kind: type[Sampler[int]], caplog: pytest.LogCaptureFixture
) -> None:
    whole = epochs(DataLoader(DATA, 4, sampler=kind()))
    assert not caplog.messages
    assert len({tuple(epoch) for epoch in whole}) == 4
    for first in range(4):
        assert epochs(DataLoader(DATA, 4, sampler=kind()), first) == whole[first:]


@pytest.mark.parametrize("read", [lambda loader: epochs(loader), lambda loader: evaluated(loader, 0)])
def test_a_sampler_that_keeps_state_is_reported_once(
    read: Callable[[DataLoader], Any], caplog: pytest.LogCaptureFixture
) -> None:
    read(DataLoader(DATA, 4, sampler=InPlace()))
    (line,) = caplog.messages
    assert "the sampler InPlace keeps state: " in line


@pytest.mark.parametrize(("seed", "step"), [(1, 0), (1, 2), (2, 0), (2, 2)])
def test_a_resumed_run_that_splits_its_data_in_another_way_is_told(
    seed: int, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    def split(seed: int) -> DataLoader:
        return DataLoader(Subset(DATA, torch.randperm(50, generator=torch.Generator().manual_seed(seed))), shuffle=True)

    begun = training_loader(split(1), FIRST)
    next(iter(begun))
    resumed = training_loader(split(seed), FIRST)
    resumed.batch_sampler.start_at(0, step, begun.batch_sampler.state_at(step))
    next(iter(resumed))
    assert ("starts with different samples than before" in caplog.text) == (seed == 2)


class WholeBatches(PlainData):
    """Each sample is a batch, as people write it where a dataset makes them: with a batch size of 1."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader([next(iter(super().train_dataloader()))] * 4, collate_fn=lambda one: one[0])


def test_samples_that_are_batches_are_not_dropped(train: Train) -> None:
    run = (PLAIN_MODEL, f"data._target_={__name__}.WholeBatches", "trainer.accelerator=cpu", "trainer.max_steps=2")
    assert "type micro_batch_size=1" in train(*run, check=False).refusal
    train(*run, "micro_batch_size=1", "global_batch_size=2")


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
    assert loader.sampler.num_replicas == replicas  # the user's own is left alone


def test_a_sampler_that_never_ends_is_refused() -> None:
    class Endless(EpochSampler):
        def __iter__(self) -> Iterator[int]:
            return itertools.cycle(range(50))

    with pytest.raises(Refused, match=r"Endless draws more samples, but its len\(\) was 50"):
        trained(DataLoader(DATA, 4, sampler=Endless()))


def test_a_sampler_that_draws_another_number_than_it_tells_is_refused() -> None:
    with pytest.raises(Refused, match=r"WrongLength draws 50 samples, but its len\(\) was 60"):
        trained(DataLoader(DATA, 4, sampler=WrongLength()))


class Noisy(Dataset):
    level = 1.0

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.level * torch.rand(())


def test_the_samples_of_a_subset_are_drawn_each_by_itself() -> None:
    """A split has it: torch's Subset reads batches, and hands them on one by one."""
    whole, split = Noisy(), Subset(Subset(Noisy(), range(50)), range(50))
    read = [torch.cat(list(training_loader(DataLoader(one, 5), FIRST))) for one in (whole, split)]
    assert torch.equal(*read)


def test_evaluation_reads_the_same_samples_each_time_however_they_are_drawn() -> None:
    shares = [list(evaluation_loader(DataLoader(Noisy(), 5), RankShare(PLAN, rank, 1))) for rank in (0, 1, 0, 1)]
    alone = torch.cat(list(evaluation_loader(DataLoader(Noisy(), 5), RankShare(BatchPlan(12, 12, 1, 1), 0, 1))))
    assert torch.equal(torch.cat([torch.cat(share) for share in shares[:2]]), alone)
    assert torch.equal(torch.cat([torch.cat(share) for share in shares[2:]]), alone)


def test_what_a_hook_sets_on_a_dataset_reaches_it() -> None:
    dataset = Noisy()
    remade = training_loader(DataLoader(dataset, 5), FIRST)
    remade.dataset.level = 0.0
    assert dataset.level == 0.0
    assert remade.dataset[3] == 0
    assert sum(batch.sum() for batch in remade) == 0


# Copies of loaders


class Numbers(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(50))


class Unsized(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class OwnLength(DataLoader):
    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)


class Doubling(DataLoader):
    """As people write a loader that prepares batches for a device: with an `__iter__` and an attribute of its own."""

    def __init__(self, samples: object, factor: int) -> None:
        super().__init__(samples, 5)
        self.factor = factor

    def __iter__(self):
        for batch in super().__iter__():
            yield batch * self.factor


class Buckets(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        ([1, 2], "it is a list, not a torch DataLoader"),
        (DataLoader(DATA, batch_size=None), "it has batch_size=None, so its dataset makes the batches"),
        (DataLoader(Numbers(), batch_size=None), "it has batch_size=None, so its dataset makes the batches"),
        (DataLoader(Numbers()), None),
        (DataLoader(DATA, batch_sampler=Buckets(SequentialSampler(DATA), 3, False)), None),
        (DataLoader(DATA, batch_sampler=Unsized()), "its batch sampler, Unsized, has no len()"),
        (DataLoader(DATA, batch_size=3), None),
        (OwnLength(DATA, 4), "its class, OwnLength, has a __len__ of its own"),
        (Doubling(Numbers(), 2), "its class, Doubling, has an __iter__ of its own"),
        (DataLoader(DATA, 3, sampler=Unsized()), "its sampler, Unsized, has no len()"),
    ],
)
def test_what_cannot_be_remade_is_told_apart(loader: object, reason: str | None) -> None:
    assert obstacle(loader) == reason


def test_an_epoch_that_drops_all_it_has_is_refused() -> None:
    with pytest.raises(Refused, match=r"has 50 samples .* use global_batch_size=50 or fewer"):
        training_loader(DataLoader(DATA, 5, drop_last=True), RankShare(BatchPlan(60, 30, 2, 1), 0, 1))


def test_where_workers_read_torch_pins_in_a_thread() -> None:
    for workers in (0, 2):  # a dataset in this process may return tensors of the GPU, which torch fails to pin
        loader = DataLoader(DATA, 5, num_workers=workers)
        assert evaluation_loader(loader, FIRST, pins_for_gpu=True).pin_memory == (workers > 0)


@pytest.mark.gpu
def test_batches_of_workers_lie_in_pinned_memory() -> None:
    loader = evaluation_loader(DataLoader(DATA, 5, num_workers=2), FIRST, pins_for_gpu=True)
    assert all(batch[0].is_pinned() for batch in loader)


def test_a_loaders_own_methods_and_attributes_are_those_of_the_remade_one() -> None:
    remade = training_loader(Doubling(range(50), 2), FIRST)
    assert isinstance(remade, Doubling)
    assert next(iter(remade)).tolist() == [0, 2, 4, 6, 8, 10]
    assert (remade.batch_size, remade.sampler) == (5, remade.batch_sampler)  # as modules ask for them


def _nothing(worker: int) -> None:
    pass


def test_all_arguments_of_a_loader_are_those_of_the_remade_one() -> None:
    given = {
        **dict(num_workers=2, prefetch_factor=3, persistent_workers=True, timeout=7),
        **dict(worker_init_fn=_nothing, generator=torch.Generator(), collate_fn=torch.stack, pin_memory=True),
        **dict(multiprocessing_context=torch.multiprocessing.get_context("spawn"), drop_last=True),
    }
    remade = evaluation_loader(DataLoader(DATA, 5, **given), FIRST)
    assert {name: getattr(remade, name) for name in given} == given
    missing = inspect.signature(DataLoader).parameters.keys() - given.keys()
    assert missing == {"dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "pin_memory_device", "in_order"}


def test_batches_come_in_order_although_a_loader_takes_them_as_they_are_ready() -> None:
    loader = DataLoader(DATA, 4, num_workers=2, in_order=False)
    assert training_loader(loader, FIRST).in_order
