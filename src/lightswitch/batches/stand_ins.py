"""Objects in the place of a user's dataset or sampler, and the dataset that seeds generators before each sample."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

from lightswitch.batches.generators import mix, mix_each, own_generators, seed_generators, seed_own

log = logging.getLogger(__name__)


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
    the global ones, and those that the dataset and the collate function keep: in their attributes, in transforms, in
    the datasets that it is made of. A dataset with a batched `__getitems__` is seeded once a batch, by its first place.
    """

    def __init__(self, dataset: Any, seed: int, collate_fn: Any = None) -> None:
        self._seed, self._kept = seed, KeptGenerators((dataset, collate_fn))
        self.given = dataset

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, index: Any) -> Any:
        return self.given[index]

    def __getitems__(self, key: Any) -> Any:
        if not isinstance(key, tuple):  # of a loader that the module makes itself, with this dataset
            whole = reads_batches(self.given)
            return self.given.__getitems__(key) if whole else [self.given[index] for index in key]
        epoch, place, indices = key
        return self._read(epoch, range(place, place + len(indices)), indices)

    def _read(self, epoch: int, places: Sequence[int], indices: list[Any]) -> Any:
        seeds = mix_each(places, self._seed, epoch)
        if reads_batches(self.given):
            return self._kept.seeded(self.given.__getitems__, [indices], seeds, epoch)[0]
        return self._kept.seeded(self.given.__getitem__, indices, seeds, epoch)


class EvaluatedSamples(SeededSamples):
    """Map-style dataset whose samples are the same in each evaluation, even if they are drawn at random."""

    def __getitems__(self, indices: Any) -> Any:
        return self._read(0, [_number(index) for index in indices], indices)


def _number(index: Any) -> int:
    """Return an integer for an index; a sampler may yield any key that the dataset accepts."""
    return index if isinstance(index, int) else mix(*str(index).encode())


class KeptGenerators:
    """Generators that a user's data keep, which are looked for once an epoch and process.

    Args:
        owner: the dataset or collate function.
    """

    def __init__(self, owner: object) -> None:
        self._owner = owner
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
        self._found, one = own_generators(self._owner), next(each)
        first = self._seeded(read, *one)
        before, self._found = self._found, own_generators(self._owner)
        if self._found != before:  # one that was made just now, on first use, has drawn without a seed
            first = self._seeded(read, *one)
        if is_first and _is_first_process() and content_digest(self._seeded(read, *one)) != content_digest(first):
            _report_unseeded(read)
        return [first, *(self._seeded(read, *one) for one in each)]

    def _seeded(self, read: Callable[[Any], Any], argument: Any, seed: int) -> Any:
        seed_generators(seed)
        if self._found:
            seed_own(self._found, seed)
        return read(argument)


def _is_first_process() -> bool:
    rank = rank_zero_only.rank  # type: ignore[attr-defined]  # Lightning's, set past its declaration
    return rank == 0 and ((worker := get_worker_info()) is None or worker.id == 0)


def _report_unseeded(read: Callable[[Any], Any]) -> None:
    log.warning(
        "%s draws from a random generator that is not seeded: read twice under one seed, it differs, so a resumed run "
        "and each worker draw other numbers; use the global generators of torch, NumPy or Python, or keep yours in an "
        "attribute of the dataset or of its transform",
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


def reads_batches(dataset: Any) -> bool:
    """Return whether a dataset reads several samples at once; torch's Subset only forwards `__getitems__`."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def takes_one(loader: DataLoader[Any]) -> bool:
    """Return whether a collate function returns the first of several samples, as for a dataset that makes batches."""
    samples = [object(), object()]
    try:
        return bool(loader.collate_fn(samples) is samples[0]) and not reads_batches(loader.dataset)
    except Exception:  # whatever it raises for objects that are no samples
        return False
