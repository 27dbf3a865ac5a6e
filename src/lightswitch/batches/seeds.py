"""Seeds of random generators, and the dataset that seeds them before each sample."""

from __future__ import annotations

import logging
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import islice
from types import MethodType
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, Subset, get_worker_info

log = logging.getLogger(__name__)
_MASK = (1 << 64) - 1
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_MOST_ITEMS = 64  # of a list or dict: a list of transforms is shorter, a list of samples has nothing to seed


def mix(*numbers: int) -> int:
    """Return a 64-bit hash of integers, equal in every process (SplitMix64's finaliser; Steele et al. 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def mix_each(numbers: Sequence[int], *before: int) -> list[int]:
    """Return ``mix(*before, number)`` of each number, computed together."""
    state = np.array([number & _MASK for number in numbers], dtype=np.uint64)
    state += np.uint64((mix(*before) + 0x9E3779B97F4A7C15) & _MASK)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    seeds: list[int] = (state ^ (state >> np.uint64(31))).tolist()
    return seeds


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators of Python, NumPy and torch's CPU.

    Args:
        device: the device in use, whose generator is seeded as well: CUDA, Apple's MPS, or another backend.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds every backend: 20 times slower
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def generator_states(device: torch.device) -> tuple[Any, ...]:
    """Return the states of the generators of Python, NumPy, torch's CPU and a device."""
    of_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return random.getstate(), np.random.get_state(), torch.random.get_rng_state(), of_device


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context in which the generators of Python, NumPy and torch's CPU begin with a seed; restores them."""
    with isolate_rng(include_cuda=False):
        seed_generators(seed)
        yield


def own_generators(*owners: object) -> list[Any]:
    """Return the generators that objects keep in attributes, and those in the attributes of these, such as transforms.

    Lists and dicts among the attributes are opened. The order is that of the attributes, nearest first; the global
    generators are left out. One further inside is not seeded: what draws from it is reported (`KeptGenerators`).
    """
    nearest = [value for owner in owners for value in _attributes(owner)]
    inside = [value for one in nearest for value in _attributes(one)]
    found = {id(one): one for one in (*nearest, *inside) if isinstance(one, _KINDS)}
    of_all = {id(one) for one in (torch.default_generator, np.random.mtrand._rand, random._inst)}
    return [one for key, one in found.items() if key not in of_all]


def _attributes(owner: object) -> list[Any]:
    owner = owner.__self__ if isinstance(owner, MethodType) else owner  # such as a collate function
    try:
        values = object.__getattribute__(owner, "__dict__").values()  # a user's __getattr__ may raise anything
    except AttributeError:
        return []
    found: list[Any] = []
    for value in values:
        if isinstance(value, dict):
            found += islice(value.values(), _MOST_ITEMS)
        elif isinstance(value, list | tuple):
            found += value[:_MOST_ITEMS]
        else:
            found.append(value)
    return found


def seed_own(generators: Sequence[Any], seed: int) -> None:
    """Seed the generators that a user's objects keep, each by a seed of its own, so that they draw unlike numbers.

    Their states would differ by process and after a resume.
    """
    for index, generator in enumerate(generators):
        own = mix(seed, index) if index else seed
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own >> 1)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(own).state
        else:
            generator.seed(own & 0xFFFFFFFF if isinstance(generator, np.random.RandomState) else own)


def restoring(generator: Any) -> Callable[[], None]:
    """Return a function that puts a generator back into the state that it is in now."""
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", deepcopy(generator.bit_generator.state))
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())


class StandIn:
    """Mixin for an object in the place of a user's, whose attributes can be read and set here as well.

    Attributes:
        given: the user's object. From when it is set, other new attributes are set on it.
    """

    given: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "given" not in vars(self):  # while unpickling, there is none yet
            raise AttributeError(name)
        return getattr(self.given, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name in vars(self) or name.startswith("_") or "given" not in vars(self)
        super().__setattr__(name, value) if is_own else setattr(self.given, name, value)


class SeededSamples(StandIn, Dataset[Any]):
    """Map-style dataset that seeds the generators before it reads a sample, by (seed, epoch, place in its order).

    So a sample that a sampler draws several times in an epoch is augmented each time in another way. The generators are
    the global ones, and those that the dataset and the collate function keep. A dataset with a batched `__getitems__`
    is seeded once a batch, by its first place.
    """

    def __init__(self, dataset: Any, seed: int, collate_fn: Any = None) -> None:
        self._seed, self._kept = seed, KeptGenerators(whole_dataset(dataset), collate_fn)
        self._reads_batches = reads_batches(dataset)
        self.given = dataset

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, index: Any) -> Any:
        return self.given[index]

    def __getitems__(self, key: Any) -> Any:
        if not isinstance(key, tuple):  # of a loader that the module makes itself, with this dataset
            return self.given.__getitems__(key) if self._reads_batches else [self.given[index] for index in key]
        epoch, place, indices = key
        return self._read(epoch, range(place, place + len(indices)), indices)

    def _read(self, epoch: int, places: Sequence[int], indices: list[Any]) -> Any:
        if self._reads_batches:
            return self._kept.seeded(self.given.__getitems__, [indices], [mix(self._seed, epoch, places[0])], epoch)[0]
        return self._kept.seeded(self.given.__getitem__, indices, mix_each(places, self._seed, epoch), epoch)


class EvaluatedSamples(SeededSamples):
    """Map-style dataset whose samples are the same in each evaluation, even if they are drawn at random."""

    def __getitems__(self, indices: Any) -> Any:
        # a sampler may yield any key that the dataset accepts
        numbers = [index if isinstance(index, int) else mix(*str(index).encode()) for index in indices]
        return self._read(0, numbers, indices)


class KeptGenerators:
    """Generators that a user's data keep, which are looked for once an epoch and process.

    Args:
        owners: the dataset and its collate function.
    """

    def __init__(self, *owners: object) -> None:
        self._owners = owners
        self._found: list[Any] = []
        self._epoch: int | None = None

    def seeded(
        self, read: Callable[[Any], Any], arguments: Sequence[Any], seeds: Iterable[int], epoch: int
    ) -> list[Any]:
        """Return ``read(argument)`` of each argument, with the global generators and these in the state of a seed.

        The first one in a process is read twice, and a difference reported.
        """
        each = zip(arguments, seeds, strict=False)
        if self._epoch == epoch:
            return [self._seeded(read, *one) for one in each]
        is_first, self._epoch = self._epoch is None, epoch
        self._found, one = own_generators(*self._owners), next(each)
        first = self._seeded(read, *one)
        before, self._found = self._found, own_generators(*self._owners)
        if self._found != before:  # one that was made just now, on first use, has drawn without a seed
            first = self._seeded(read, *one)
        if is_first and content_digest(self._seeded(read, *one)) != content_digest(first):
            _report_unseeded(read)
        return [first, *(self._seeded(read, *one) for one in each)]

    def _seeded(self, read: Callable[[Any], Any], argument: Any, seed: int) -> Any:
        seed_generators(seed)
        if self._found:
            seed_own(self._found, seed)
        return read(argument)


@rank_zero_only
def _report_unseeded(read: Callable[[Any], Any]) -> None:
    if (worker := get_worker_info()) is None or worker.id == 0:
        log.warning(
            "%s draws from a random generator that is not seeded: read twice under one seed, it differs, so a resumed "
            "run and each worker draw other numbers; use the global generators of torch, NumPy or Python, or keep "
            "yours in an attribute of the dataset or of its transform",
            type(getattr(read, "__self__", read)).__name__,
        )


def content_digest(samples: Any) -> int:
    """Return a checksum of samples, equal in every process. Of objects that are not data, only the type counts."""
    digest = 0
    for leaf in tree_leaves(samples):
        digest = zlib.crc32(_content(leaf), digest)
    return digest


def _content(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_meta:
        return leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, np.ndarray):
        return leaf.tobytes()
    if leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes | np.generic):
        return repr(leaf).encode()
    return type(leaf).__name__.encode()


def whole_dataset(dataset: Any) -> Any:
    """Return the dataset that torch's Subset, as of a random split, was taken from."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def reads_batches(dataset: Any) -> bool:
    """Return whether a dataset reads several samples at once; torch's Subset only forwards `__getitems__`."""
    return callable(getattr(whole_dataset(dataset), "__getitems__", None))
