"""Which samples an epoch has, and in which order, as a loader's own sampler draws them for one device."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightswitch.batches.randomness import mix, seed_generators
from lightswitch.errors import Refused


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler of a map-style loader, as of one device.

    torch puts one that a BatchSampler was given nowhere else; one that deals out shares by rank gives all of them.
    """
    sampler = unwrapped(loader.batch_sampler).sampler
    return sampler if type(sampler) is DistributedSampler else _undivided(sampler, loader.dataset)


def unwrapped(batch_sampler: Any) -> Any:
    """Return the batch sampler inside of the wrapper that Lightning puts around it for prediction."""
    return getattr(batch_sampler, "_batch_sampler", batch_sampler)


def samples_of(sampler: Any, dataset: Any) -> int:
    """Return the samples of an epoch over all ranks; a DistributedSampler's length is one rank's share."""
    return len(dataset) if type(sampler) is DistributedSampler else len(sampler)


def epoch_order(sampler: Any, samples: int, seed: int, key: int, epoch: int | None = None) -> Sequence[Any]:
    """Return the sample indices of an epoch as a sampler draws them under (seed, key), the same on every rank.

    Args:
        sampler: any; of a DistributedSampler only whether it shuffles counts.
        samples: of an epoch, over all ranks.
        key: the epoch's number, or what stands for it.
        epoch: that a sampler is told which shuffles by it; None for the key.

    Raises:
        Refused: the sampler draws another number than its `len()` tells.
    """
    generator = torch.Generator().manual_seed(mix(seed, key) >> 1)
    if type(sampler) is DistributedSampler:  # its shares have another size: only its shuffling counts
        return _permutation(samples, generator) if sampler.shuffle else range(samples)
    if type(sampler) is SequentialSampler:
        return range(samples)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == samples:
        return _permutation(samples, generator)
    return _drawn(sampler, samples, mix(seed, key), key if epoch is None else epoch)


def _undivided(sampler: Any, dataset: Any) -> Any:
    """Return a sampler that yields the samples of all ranks: a copy of one that deals them out."""
    replicas = getattr(sampler, "num_replicas", None)
    if replicas is None or not hasattr(sampler, "rank"):
        return sampler
    undivided = copy.copy(sampler)
    undivided.num_replicas, undivided.rank = 1, 0
    if hasattr(sampler, "total_size"):
        padding = abs(sampler.total_size - len(dataset))  # or what drop_last leaves out, for shares of one size
        undivided.num_samples = undivided.total_size = len(dataset) if padding < replicas else sampler.total_size
    return undivided


def _permutation(samples: int, generator: torch.Generator) -> Sequence[int]:
    # kept as an array: ten million python ints take 1.5 s and 400 MB
    return torch.randperm(samples, generator=generator).numpy()  # type: ignore[return-value]  # a Sequence in all but name


def _drawn(sampler: Any, samples: int, seed: int, epoch: int) -> list[Any]:
    if callable(set_epoch := getattr(sampler, "set_epoch", None)):
        set_epoch(epoch)
    for own in getattr(sampler, "__dict__", {}).values():
        _seed(own, seed)
    with torch.random.fork_rng(devices=[]):
        seed_generators(seed)
        order = list(sampler)
    if len(order) != samples:
        raise Refused(
            f"the sampler {type(sampler).__name__} draws {len(order)} samples, and its len() is {samples}; let its "
            "__len__ return the number that it draws"
        )
    return order


def _seed(generator: object, seed: int) -> None:
    """Seed what a sampler keeps, if it is a generator: each rank, and a run that goes on, would have another."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed >> 1)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
