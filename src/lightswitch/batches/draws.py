"""Orders that a sampler draws, each a function of the pass's number alone, whatever the sampler keeps between passes.

A sampler may shuffle a list in place, count its epochs, or hold samplers that do. It is drawn from in copies, so that
the user's own object is only changed by the user, and a resumed run draws first what the run before has drawn.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightswitch.batches.generators import is_generator, is_of_run, own_generators, seed_generators, seed_own, unseeded
from lightswitch.errors import Refused

log = logging.getLogger(__name__)
_SHARED = (type, FunctionType, BuiltinFunctionType, ModuleType, Dataset, DataLoader, nn.Module)
Place = Callable[[int], tuple[int, int]]  # returns a pass's seed, and the epoch for `set_epoch`


class Draws:
    """Orders of a sampler by the number of the pass.

    The order of pass n is what a copy of the sampler, as it is at that time, draws after n others. For a sampler with
    `set_epoch`, which tells it n, and for one that drawing does not change, these are not drawn.

    Args:
        samples: number of samples of a pass, over all ranks.
        dataset: the loader's dataset, which is never copied.
        tells: log what can't be copied; one rank does.
        of_batches: whether it is a batch sampler, of which at most one more batch than `samples` is drawn, each a list.
        whole: returns a sampler that draws for all ranks, given one.
        is_cut: of a batch sampler, leave out what it forms beyond its `len()`, as Lightning does.

    Raises:
        Refused: by `order`: the sampler draws another number of samples than its `len()`.
    """

    def __init__(
        self,
        sampler: Any,
        samples: int,
        dataset: Any = None,
        tells: bool = False,
        of_batches: bool = False,
        whole: Callable[[Any], Any] = lambda sampler: sampler,
        is_cut: bool = False,
    ) -> None:
        self._sampler, self._samples, self._dataset, self._tells = sampler, samples, dataset, tells
        self._of_batches, self._whole, self._is_cut = of_batches, whole, is_cut
        self._last: tuple[int, Sequence[Any]] | None = None  # number and order
        self._begun: _Snapshot | None = None  # of the sampler, when `_copy` was made
        self._copy: Any = None
        self._next = 0  # number of the pass that `_copy` would draw

    def order(self, number: int, place: Place) -> Sequence[Any]:
        """Return the order of a pass.

        Args:
            place: returns the seed and the epoch of a pass by its number.
        """
        if self._last is None or self._last[0] != number:
            self._last = number, self._checked(self._drawn(number, place))
        return self._last[1]

    def _drawn(self, number: int, place: Place) -> list[Any]:
        if type(self._sampler).__module__.startswith("torch.utils.data"):  # keeps nothing but a generator
            return self._draw(self._sampler, *place(number))
        snapshot = self._snapshot()
        if snapshot is None:
            return self._draw(self._whole(self._sampler), *place(number))
        if self._by_epoch(self._sampler):
            return self._draw(self._whole(snapshot.copy()), *place(number))
        if snapshot != self._begun or number < self._next:
            self._begun, self._copy, self._next = snapshot, self._whole(snapshot.copy()), 0
        self._catch_up(number, place)
        self._next = number + 1
        return self._draw(self._copy, *place(number))

    def _catch_up(self, number: int, place: Place) -> None:
        """Draw the passes before a pass, unless the first one leaves the sampler as it was."""
        if self._next == 0 < number:
            before = _Snapshot.of(self._copy, self._dataset)
            self._draw(self._copy, *place(0))
            self._next = number if _Snapshot.of(self._copy, self._dataset) == before else 1
        for earlier in range(self._next, number):
            self._draw(self._copy, *place(earlier))

    def _snapshot(self) -> _Snapshot | None:
        try:
            snapshot = _Snapshot.of(self._sampler, self._dataset)
        except Exception as error:  # whatever the sampler's own __getstate__ or __reduce__ raises
            self._tell(f"can't be copied ({type(error).__name__}: {error})")
            return None
        for kind in snapshot.iterators:
            self._tell(f"keeps a {kind}, which can't be copied")
        return snapshot

    def _tell(self, what: str) -> None:
        if self._tells:
            self._tells = False
            log.warning(
                "the sampler %s %s: the samples of an epoch depend on what it has drawn before, and a resumed run may "
                "read others; let its __iter__ begin anew each time",
                type(self._sampler).__name__, what,
            )  # fmt: skip

    def _draw(self, sampler: Any, seed: int, epoch: int) -> list[Any]:
        for one in self._by_epoch(sampler):
            one.set_epoch(epoch)
        seed_own(own_generators(sampler), seed)
        with torch.random.fork_rng(devices=[]):
            seed_generators(seed)
            # one too many is enough: a sampler may never end
            drawn = islice(sampler, self._samples + 1)
            return [_listed(batch) for batch in drawn] if self._of_batches else list(drawn)

    def _by_epoch(self, sampler: Any) -> list[Any]:
        """Return those that take the epoch among a sampler and, as Lightning does, a batch sampler's own sampler."""
        both = [sampler, getattr(sampler, "sampler", None)] if self._of_batches else [sampler]
        return [one for one in both if callable(getattr(one, "set_epoch", None))]

    def _checked(self, order: list[Any]) -> list[Any]:
        name, drawn = type(self._sampler).__name__, "more" if len(order) > self._samples else len(order)
        if self._of_batches and drawn == "more" and not self._is_cut:
            raise Refused(
                f"the batch sampler {name} splits by rank, and forms more than the {self._samples} batches of its "
                "len() when it is to form those of all ranks; compute its len() from num_replicas, or type "
                "data.sharded_by=dataset"
            )
        if self._of_batches:
            return order[: self._samples]
        if len(order) != self._samples:
            raise Refused(
                f"the sampler {name} draws {drawn} samples, but its len() was {self._samples} "
                "when training began; correct its __len__, and keep it the same in all epochs"
            )
        return order


def _listed(batch: Any) -> list[Any]:
    """Return a batch as a list, before the next one is drawn: a batch sampler may fill one buffer again and again."""
    return batch.tolist() if hasattr(batch, "tolist") else list(batch)


@dataclass(frozen=True, eq=False)
class _Snapshot:
    """State of a sampler: what drawing may change as bytes, and the objects that copies share with it.

    It is pickled, because `copy.deepcopy` takes ten times as long for a list of indices. Two are equal if their
    samplers draw the same; the states of generators, which are seeded for each pass, do not count.

    Attributes:
        shared: the dataset, modules, functions, classes, what belongs to the run, and what can't be pickled.
        iterators: type names of iterators that can't be pickled, so that a pass changes those of the user's sampler.
    """

    state: bytes
    shared: tuple[Any, ...]
    iterators: tuple[str, ...]

    @classmethod
    def of(cls, sampler: Any, dataset: Any) -> _Snapshot:
        pickler = _Pickler(file := io.BytesIO(), sampler, dataset)
        pickler.dump(sampler)
        return cls(file.getvalue(), tuple(pickler.shared), tuple(pickler.iterators))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Snapshot)
            and self.state == other.state
            and [*map(id, self.shared)] == [*map(id, other.shared)]
        )

    def copy(self) -> Any:
        """Return a sampler in this state."""
        return _Unpickler(io.BytesIO(self.state), self.shared).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, sampler: Any, dataset: Any) -> None:
        super().__init__(file, protocol=5)
        self.shared: list[Any] = []
        self.iterators: list[str] = []
        self._sampler, self._dataset = sampler, dataset

    def reducer_override(self, value: Any) -> Any:
        """Return how a value is pickled. Python calls it for all but numbers, text, lists and their kind."""
        if value is _shared:
            return NotImplemented
        if is_generator(value):
            return unseeded(value)
        if value is self._dataset or isinstance(value, _SHARED) or is_of_run(value):
            return self._share(value)
        try:
            return value.__reduce_ex__(5)
        except Exception:  # a lock, a file, an iterator; or raised by a user's __getstate__
            if value is self._sampler:
                raise
            if isinstance(value, Iterator):
                self.iterators.append(type(value).__name__)
            return self._share(value)

    def _share(self, value: Any) -> Any:
        self.shared.append(value)
        return _shared, (len(self.shared) - 1,)


class _Unpickler(pickle.Unpickler):
    """Unpickler of bytes that this process has just pickled: they never come from a file."""

    def __init__(self, file: io.BytesIO, shared: Sequence[Any]) -> None:
        super().__init__(file)
        self._objects = shared

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _shared.__name__):
            return self._objects.__getitem__
        return super().find_class(module, name)


def _shared(index: int) -> Any:
    """Stand in the bytes for an object that copies share; `_Unpickler` puts the object in its place."""
    raise AssertionError(f"object {index} is read by a plain unpickler")  # these bytes never leave this module
