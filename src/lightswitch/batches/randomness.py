"""Random numbers as a function of the position in the run, so that there is no generator state to save.

A resumed run draws what the uninterrupted one would have drawn, and a sample is augmented in the same way on whatever
rank and in whatever loader worker it is read.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Return a 64-bit hash of integers, equal in every process (SplitMix64's finaliser; Steele et al. 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators of Python, NumPy and torch's CPU.

    Args:
        device: the one in use, whose generator is seeded as well: of CUDA, of Apple's MPS, or of another back-end.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed asks every backend there is: 20 times slower
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def generator_states(device: torch.device) -> tuple[Any, ...]:
    """Return the states of the generators of Python, NumPy, torch's CPU and a device."""
    of_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return random.getstate(), np.random.get_state(), torch.random.get_rng_state(), of_device


def restore_generators(states: tuple[Any, ...], device: torch.device) -> None:
    """Put back what `generator_states` has returned."""
    of_python, of_numpy, of_torch, of_device = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.random.set_rng_state(of_torch)
    if of_device is not None:
        torch.get_device_module(device).set_rng_state(of_device, device)


class SeededSamples(Dataset[Any]):
    """Map-style dataset whose samples are read under a seed of their own: (seed, epoch, index).

    A dataset with a batched `__getitems__` is seeded once a batch, by its first index.

    Args:
        dataset: the user's, whose attributes are found, and set, here as well.
    """

    dataset: Any
    seed: int

    def __init__(self, dataset: Any, seed: int) -> None:
        vars(self).update(dataset=dataset, seed=seed)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, key: tuple[int, list[Any]]) -> Any:
        epoch, indices = key
        if _reads_batches(self.dataset):
            seed_generators(mix(self.seed, epoch, _number(indices[0])))
            return self.dataset.__getitems__(indices)
        return [self._sample(epoch, index) for index in indices]

    def _sample(self, epoch: int, index: Any) -> Any:
        seed_generators(mix(self.seed, epoch, _number(index)))
        return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # unpickling: there is no dataset yet to ask
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:  # by a hook, or by a worker_init_fn
        setattr(self.dataset, name, value)


class EvaluatedSamples(SeededSamples):
    """Map-style dataset whose samples are the same in each evaluation, also where they are drawn."""

    def __getitems__(self, indices: Any) -> Any:
        return super().__getitems__((0, indices))


def _reads_batches(dataset: Any) -> bool:
    """Return whether a dataset reads several samples at once; torch's Subset only hands that on, and always has it."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def _number(index: Any) -> int:
    """Return an integer for an index, which a sampler may yield as anything that a dataset takes as a key."""
    return index if isinstance(index, int) else mix(*str(index).encode())
