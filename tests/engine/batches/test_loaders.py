from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from lightswitch.batches.loaders import evaluation_loader, obstacle, takes_one, training_loader
from lightswitch.batches.plan import BatchPlan, Position
from lightswitch.errors import Refused

DATA = TensorDataset(torch.arange(50))
PLAN = BatchPlan(global_batch=12, micro_batch=6, replicas=2, accumulation=1)


class Positional(DataLoader):
    """A subclass that takes other arguments and sets its own."""

    def __init__(self, samples: int) -> None:
        super().__init__(TensorDataset(torch.arange(samples)), batch_size=4, shuffle=True)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class Endless(Sampler):
    def __iter__(self):
        return itertools.count()


class Buckets(BatchSampler):
    pass


# that of torchdata's StatefulDataLoader, which is not installed here
OfTorchdata = type("BatchSampler", (BatchSampler,), {"__module__": "torchdata.stateful_dataloader.sampler"})


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, 5, shuffle=True),
        DataLoader(DATA, 5, shuffle=True, num_workers=2),
        Positional(50),
        DataLoader(Subset(DATA, range(50))),
        DataLoader(DATA, batch_sampler=OfTorchdata(SequentialSampler(DATA), 5, False)),
    ],
)
def test_a_loader_is_remade_whoever_wrote_it(loader: DataLoader) -> None:
    ranks = [training_loader(loader, PLAN, rank, seed=1, at=Position()) for rank in range(2)]
    read = [torch.cat([batch[0] for batch in rank]) for rank in ranks]
    assert sorted(torch.cat(read).tolist()) == list(range(50))
    assert [len(rank) for rank in ranks] == [5, 5]


def test_the_users_loader_is_left_as_it_was() -> None:
    loader = DataLoader(DATA, batch_size=5)
    training_loader(loader, PLAN, 0, seed=1, at=Position())
    assert [len(batch[0]) for batch in loader] == [5] * 10


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        ([1, 2], "it is a list, not a torch DataLoader"),
        (DataLoader(DATA, batch_size=None), "it has batch_size=None, so its dataset makes the batches"),
        (DataLoader(Stream(), batch_size=None), "it has batch_size=None, so its dataset makes the batches"),
        (DataLoader(Stream()), None),
        (DataLoader(DATA, batch_sampler=Buckets(SequentialSampler(DATA), 3, False)), None),
        (DataLoader(DATA, batch_sampler=Endless()), "its batch sampler, Endless, has no len()"),
        (DataLoader(DATA, batch_size=3), None),
        (DataLoader(DATA, 3, sampler=Endless()), "its sampler, Endless, has no len()"),
    ],
)
def test_what_cannot_be_remade_is_told_apart(loader: object, reason: str | None) -> None:
    assert obstacle(loader) == reason


def test_an_epoch_that_drops_all_it_has_is_refused() -> None:
    with pytest.raises(Refused, match=r"has 50 samples .* use global_batch_size=50 or fewer"):
        training_loader(DataLoader(DATA, 5, drop_last=True), BatchPlan(60, 30, 2, 1), 0, 1, Position())


def test_an_evaluation_set_without_samples_is_refused() -> None:
    with pytest.raises(Refused, match="an evaluation set has no samples"):
        evaluation_loader(DataLoader(TensorDataset(torch.arange(0))), BatchPlan(4, 1, 4, 1), 0, 1)


def test_evaluation_batches_are_no_larger_than_the_loaders_own_or_a_micro_batch() -> None:
    assert max(len(b[0]) for b in evaluation_loader(DataLoader(DATA, 100), PLAN, 0, 1)) <= 6
    assert max(len(b[0]) for b in evaluation_loader(DataLoader(DATA, 2), PLAN, 0, 1)) <= 2


class Recorded(torch.Tensor):
    """A user's own kind of tensor, which knows whether it was pinned."""

    def pin_memory(self) -> torch.Tensor:
        return torch.zeros(3)


def test_what_is_pinned_is_what_can_be() -> None:
    batch = {"ids": torch.ones(3).as_subclass(Recorded), "sparse": torch.eye(2).to_sparse(), "name": "first"}
    elsewhere = torch.ones(4, device="meta")  # as a dataset that lies on the GPU: torch fails to pin these
    loader = DataLoader([(batch, elsewhere)], collate_fn=lambda samples: samples[0])
    ((read, same),) = evaluation_loader(loader, BatchPlan(1, 1, 1, 1), 0, 1, pins_for_gpu=True)
    assert torch.equal(read["ids"], torch.zeros(3))
    assert read["sparse"] is batch["sparse"]
    assert read["name"] == "first"
    assert same is elsewhere


def test_where_workers_read_torch_pins_in_a_thread() -> None:
    loader = DataLoader(DATA, 5, num_workers=2)
    pinning = evaluation_loader(loader, PLAN, 0, 1, pins_for_gpu=True)
    assert pinning.pin_memory is True
    assert pinning.collate_fn is loader.collate_fn


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_lie_in_pinned_memory(workers: int) -> None:
    loader = evaluation_loader(DataLoader(DATA, 5, num_workers=workers), PLAN, 0, 1, pins_for_gpu=True)
    assert all(batch[0].is_pinned() for batch in loader)


class Doubling(DataLoader):
    """As people write a loader that prepares batches for a device: with an `__iter__` and an attribute of its own."""

    def __init__(self, samples: object, factor: int) -> None:
        super().__init__(samples, 5)
        self.factor = factor

    def __iter__(self):
        for batch in super().__iter__():
            yield batch * self.factor


def test_a_loaders_own_methods_and_attributes_are_those_of_the_remade_one() -> None:
    remade = training_loader(Doubling(range(50), 2), PLAN, 0, 1, Position())
    assert isinstance(remade, Doubling)
    assert next(iter(remade)).tolist() == [0, 2, 4, 6, 8, 10]
    assert (remade.batch_size, remade.sampler) == (5, remade.batch_sampler)  # as modules ask for them


class Counting(IterableDataset):
    def __iter__(self):
        return iter(range(50))


def test_a_streams_loader_with_an_iterator_of_its_own_is_refused() -> None:
    with pytest.raises(Refused, match=r"Doubling, has an __iter__ of its own.* type data.sharded_by=dataset"):
        training_loader(Doubling(Counting(), 2), PLAN, 1, 1, Position())


def _nothing(worker: int) -> None:
    pass


def test_all_arguments_of_a_loader_are_those_of_the_remade_one() -> None:
    given = {
        **dict(num_workers=2, prefetch_factor=3, persistent_workers=True, timeout=7),
        **dict(worker_init_fn=_nothing, generator=torch.Generator(), collate_fn=torch.stack, pin_memory=True),
        **dict(multiprocessing_context=torch.multiprocessing.get_context("spawn"), drop_last=True),
    }
    remade = evaluation_loader(DataLoader(DATA, 5, **given), PLAN, 0, 1)
    assert {name: getattr(remade, name) for name in given} == given
    missing = inspect.signature(DataLoader).parameters.keys() - given.keys()
    assert missing == {"dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "pin_memory_device", "in_order"}


def test_batches_come_in_order_although_a_loader_takes_them_as_they_are_ready() -> None:
    loader = DataLoader(DATA, 4, num_workers=2, in_order=False)
    assert training_loader(loader, PLAN, 0, 1, Position()).in_order


@pytest.mark.parametrize(
    ("collate_fn", "takes"),
    [(lambda samples: samples[0], True), (list, False), (torch.utils.data.default_collate, False), (min, False)],
)
def test_a_collate_function_that_drops_all_but_the_first_sample_is_found(collate_fn: Callable, takes: bool) -> None:
    assert takes_one(DataLoader(DATA, collate_fn=collate_fn)) == takes
