from __future__ import annotations

import random
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lightswitch.batches.order import SeededSamples, mix, seed_generators
from tests.runs import context


class Noisy(Dataset):
    """Each sample is what the three generators give at that moment."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return torch.rand(1).item(), random.random(), float(np.random.rand())


def test_a_sample_is_drawn_alike_in_whatever_batch_it_is_read() -> None:
    samples = SeededSamples(Noisy(), seed=3)
    together = samples.__getitems__((1, [4, 5, 6]))
    assert samples.__getitems__((1, [6])) == together[2:]
    assert samples.__getitems__((2, [6])) != together[2:]
    assert SeededSamples(Noisy(), seed=4).__getitems__((1, [6])) != together[2:]
    assert len(set(together)) == 3


def test_a_wrapped_dataset_still_answers_for_itself() -> None:
    dataset = Noisy()
    dataset.classes = 10
    assert SeededSamples(dataset, 0).classes == 10
    assert len(SeededSamples(dataset, 0)) == 20


def test_the_hash_is_that_of_every_process_and_version() -> None:
    assert mix(1, 2, 3) == 7_702_586_659_592_502_839


def test_neighbouring_places_get_unlike_seeds() -> None:
    seeds = {mix(seed, step, micro, rank) for seed in range(5) for step in range(20) for micro in range(4)
             for rank in range(4)}  # fmt: skip
    assert len(seeds) == 5 * 20 * 4 * 4


def test_seeding_covers_torch_numpy_and_python() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(1).item(), random.random(), float(np.random.rand())

    seed_generators(mix(1))
    first = draw()
    seed_generators(mix(1))
    assert draw() == first


def _seeded() -> list[int]:
    """Return what a device of another kind than CUDA, which torch lets anybody register, is seeded with."""
    torch.utils.rename_privateuse1_backend("standin")
    seeded: list[int] = []
    torch._register_device_module("standin", SimpleNamespace(manual_seed=seeded.append))
    seed_generators(7, torch.device("standin", 0))
    return seeded


def test_seeding_covers_whatever_device_is_in_use() -> None:
    with ProcessPoolExecutor(1, context) as process:  # for what can't be registered twice
        assert process.submit(_seeded).result() == [7]


@pytest.mark.gpu
def test_seeding_covers_the_gpu() -> None:
    def draw() -> float:
        seed_generators(mix(1), torch.device("cuda:0"))
        return torch.rand(1, device="cuda:0").item()

    assert draw() == draw()
