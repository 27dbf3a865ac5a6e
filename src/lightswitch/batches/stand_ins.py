"""Objects in the place of a user's dataset or sampler, and the dataset that seeds generators before each sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset, Subset

from lightswitch.batches.generators import mix, own_generators, seed_generators, seed_own


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
        seeds = [mix(self._seed, epoch, place) for place in places]
        if reads_batches(self.given):
            return self._kept.seeded(seeds[0], epoch, self.given.__getitems__, indices)
        read = self.given.__getitem__
        return [self._kept.seeded(seed, epoch, read, index) for seed, index in zip(seeds, indices, strict=True)]


class EvaluatedSamples(SeededSamples):
    """Map-style dataset whose samples are the same in each evaluation, even if they are drawn at random."""

    def __getitems__(self, indices: Any) -> Any:
        return self._read(0, [_number(index) for index in indices], indices)


def _number(index: Any) -> int:
    """Return an integer for an index; a sampler may yield any key that the dataset accepts."""
    return index if isinstance(index, int) else mix(*str(index).encode())


class KeptGenerators:
    """Generators that a dataset keeps, which are looked for once an epoch and process.

    Args:
        owner: the dataset.
    """

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self._found: list[Any] = []
        self._epoch: int | None = None

    def seeded(self, seed: int, epoch: int, read: Callable[[Any], Any], what: Any) -> Any:
        """Return ``read(what)``, with the global generators and these in the state of a seed."""
        if self._epoch == epoch:
            return self._seeded(seed, read, what)
        self._found, self._epoch = own_generators(self._owner), epoch
        sample = self._seeded(seed, read, what)
        before, self._found = self._found, own_generators(self._owner)
        # read again if a generator that was made just now, on first use, has drawn without a seed
        return sample if self._found == before else self._seeded(seed, read, what)

    def _seeded(self, seed: int, read: Callable[[Any], Any], what: Any) -> Any:
        seed_generators(seed)
        if self._found:
            seed_own(self._found, seed)
        return read(what)


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
