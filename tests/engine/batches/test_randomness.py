from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, WeightedRandomSampler

from lightswitch.batches.loaders import training_loader
from lightswitch.batches.plan import BatchPlan, RankShare
from lightswitch.batches.seeds import SeededSamples, mix, mix_each, own_generators, seed_generators


class Noisy(Dataset):
    """Each sample is what the three generators give at that moment."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return torch.rand(1).item(), random.random(), float(np.random.rand())


def test_a_sample_is_drawn_alike_in_whatever_batch_it_is_read() -> None:
    samples = SeededSamples(Noisy(), seed=3)
    together = samples.__getitems__((1, 0, [4, 5, 6]))
    assert samples.__getitems__((1, 2, [6])) == together[2:]
    assert samples.__getitems__((2, 2, [6])) != together[2:]
    assert SeededSamples(Noisy(), seed=4).__getitems__((1, 2, [6])) != together[2:]
    assert len(set(together)) == 3


def test_a_sample_that_is_drawn_again_in_an_epoch_is_augmented_anew() -> None:
    """As one of a rare class is by a WeightedRandomSampler."""
    loader = DataLoader(Noisy(), sampler=WeightedRandomSampler([1.0] + [0.0] * 19, 20), collate_fn=list)
    read = [training_loader(loader, RankShare(BatchPlan(10, 5, 2, 1), rank, 3)) for rank in range(2)]
    assert len({sample for ranks in read for batch in ranks for sample in batch}) == 20


class Masking:
    """A collate function that keeps a generator."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()

    def __call__(self, samples: list[Any]) -> Tensor:
        return torch.tensor([len(samples), self.rng.random()])


def test_a_generator_of_a_collate_function_follows_the_position() -> None:
    share = RankShare(BatchPlan(5, 5, 1, 1), 0, 3)
    loaders = [training_loader(DataLoader(Noisy(), collate_fn=Masking()), share) for _ in range(2)]
    loaders[1].batch_sampler.start_at(0, 2)
    whole, rest = ([batch.tolist() for batch in loader] for loader in loaders)
    assert rest == whole[2:]
    assert len({draw for _, draw in whole}) == 4


class Transform:
    """Keeps a generator, as those of Albumentations do."""

    def __init__(self) -> None:
        self.rng, self.py_random = np.random.default_rng(), random.Random()

    def __call__(self, value: float) -> float:
        return value + self.rng.random() + self.py_random.random()


class Keeping(Dataset):
    """Draws by generators of its own: one of them made on first use, others in its transforms."""

    rng: np.random.RandomState | None = None

    def __init__(self) -> None:
        self.transforms = {"train": Transform(), "val": Transform()}
        self.generator = torch.Generator()

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> float:
        self.rng = self.rng or np.random.RandomState()
        value = torch.rand((), generator=self.generator).item() + self.rng.rand()
        return sum(transform(value) for transform in self.transforms.values())


class Batched(Keeping):
    def __getitems__(self, indices: list[int]) -> list[float]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("made", [Keeping, lambda: Subset(Keeping(), range(20)), Batched])
def test_generators_that_a_dataset_keeps_are_seeded_as_the_global_ones(made: Callable[[], Any]) -> None:
    """A resumed run, and each worker, has others, which have drawn another number of times."""
    samples = SeededSamples(made(), seed=3)
    first, second = samples.__getitems__((1, 0, [4, 5])), samples.__getitems__((2, 0, [4, 5]))
    assert len({*first, *second}) == 4
    worker = pickle.loads(pickle.dumps(samples))
    for other in (samples, worker, SeededSamples(made(), seed=3)):
        assert other.__getitems__((2, 0, [4, 5])) == second
        assert other.__getitems__((1, 0, [4, 5])) == first


def _drawing() -> Callable[[], float]:
    rng = np.random.default_rng()
    return lambda: float(rng.random())


class OutOfReach(Noisy):
    """Draws by a generator in the closure of a function."""

    draw = staticmethod(_drawing())

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return (*super().__getitem__(index)[:2], self.draw())


@pytest.mark.parametrize(("dataset", "lines"), [(OutOfReach, 1), (Noisy, 0), (Keeping, 0), (Batched, 0)])
def test_a_generator_that_is_out_of_reach_is_reported_once(
    dataset: type[Dataset], lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    samples = SeededSamples(dataset(), seed=3)
    for epoch in range(2):
        samples.__getitems__((epoch, 0, [4, 5]))
    told = f"{dataset.__name__} draws from a random generator that is not seeded: "
    assert [line.startswith(told) for line in caplog.messages] == [True] * lines


def test_only_what_belongs_to_a_dataset_is_seeded() -> None:
    dataset = Keeping()
    dataset.random, dataset.itself, dataset.default = random._inst, dataset, torch.default_generator
    assert len(own_generators(dataset)) == 5


def test_the_hash_is_that_of_every_process_and_version() -> None:
    assert mix(1, 2, 3) == 7_702_586_659_592_502_839
    numbers = [0, 3, (1 << 64) - 1, -5]
    assert mix_each(numbers, 1, 2) == [mix(1, 2, number) for number in numbers]


def test_seeding_covers_torch_numpy_and_python() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(1).item(), random.random(), float(np.random.rand())

    seed_generators(mix(1))
    first = draw()
    seed_generators(mix(1))
    assert draw() == first


@pytest.mark.gpu
def test_seeding_covers_the_gpu() -> None:
    def draw() -> float:
        seed_generators(mix(1), torch.device("cuda:0"))
        return torch.rand(1, device="cuda:0").item()

    assert draw() == draw()
