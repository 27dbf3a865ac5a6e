"""Reader of a stream of samples (an IterableDataset): each process reads all of it and selects its rank's slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, _utils, get_worker_info

from lightswitch import patches
from lightswitch.batches.generators import mix, seed_generators
from lightswitch.batches.plan import BatchPlan, pieces
from lightswitch.batches.stand_ins import StandIn, content_digest

_COMPARED_SAMPLES = 16  # first samples of a reader, whose digest is compared among readers
_STATE_SHARE = 0.05  # maximum share of a reader's time that the dataset's state_dict() takes

Groups = Callable[[Iterator[Any]], Iterator[list[Any]]]
_PLAIN = (bool, int, float, str, bytes)
_ARRAY = "numpy"  # key of a dict that represents an array, which a checkpoint would return as a tensor


class Resume(NamedTuple):
    """Step of a pass at which a run resumes, and the dataset's state at the nearest step before it."""

    step: int  # of the pass
    state_step: int = 0
    state: Any = None


class Place(NamedTuple):
    """Position of a micro-batch in a stream, with which a loader requests it from a reader."""

    turn: int  # number of the iteration over the loader; each begins at the stream's start, or where a run resumes
    epoch: int  # passed to the dataset's set_epoch
    key: int  # identifies the pass through the stream in its seeds
    begin: int  # steps of the epoch before this pass
    step: int  # of the epoch
    micro: int
    resume: Resume | None = None  # only in the first place that a reader gets


class Cut(NamedTuple):
    """Micro-batch that a reader sends to training, with information about its step."""

    place: Place
    batch: Any  # a list of samples; after collation, its result
    samples: int  # of the whole step, over all ranks; 0 if the stream has ended
    state: Any = None  # packed state of the dataset after this step, or UnsavableState
    digest: int | None = None  # of this reader's first samples in a pass; only with its first micro-batch
    skipped: tuple[int, float] | None = None  # samples that a resumed run skipped, and the seconds that took
    own_samples: int = 0  # of this micro-batch, once it is collated


class UnsavableState(NamedTuple):
    """Marker for a state that a checkpoint can't store."""

    kind: str


def global_batches(samples: Iterator[Any], size: int, drop_last: bool) -> Iterator[list[Any]]:
    """Yield global batches, without reading samples ahead of the requested batch."""
    while (batch := list(islice(samples, size))) and (len(batch) == size or not drop_last):
        yield batch


def rounds(samples: Iterator[Any], size: int, replicas: int) -> Iterator[list[Any]]:
    """Yield rounds: the samples that all ranks evaluate together, at least one for each rank.

    To ensure that, the last rounds are split into similar sizes, as in `batches.evaluation`.
    Fewer samples than ranks form one round.
    """
    ahead = list(islice(samples, size + replicas))
    while len(ahead) == size + replicas:
        yield ahead[:size]
        ahead = ahead[size:] + list(islice(samples, size))
    count = last_rounds(len(ahead), size, replicas)
    for piece in pieces(ahead, count):
        yield [*piece]


def last_rounds(samples: int, size: int, replicas: int) -> int:
    """Return the number of rounds for a stream's last samples, which are fewer than ``size + replicas``."""
    return max(1, min(-(-samples // size), samples // replicas)) if samples else 0


class IndexedStream(StandIn, Dataset[Any]):
    """Map-style dataset over a stream, indexed by `Place`, because torch sends indices also to persistent workers."""

    def __init__(self, dataset: Any, cursor: Cursor) -> None:
        self._cursor, self.given = cursor, dataset

    def __getitem__(self, place: Place) -> Cut:
        return self._cursor.cut(self.given, place)


class Cursor:
    """Position of a reader in a stream.

    The generators of Python, NumPy and torch are seeded by the position, so that whatever the stream shuffles with them
    is the same for every reader, and after a resume.

    Args:
        rank: this process's data-parallel rank, below ``plan.replicas``.
        groups: splits the stream into the samples that all ranks read in a step.
        seeded_samples: number of samples after which generators are seeded again.
    """

    def __init__(self, plan: BatchPlan, rank: int, seed: int, groups: Groups, seeded_samples: int) -> None:
        self.plan = plan
        self.rank = rank
        self.seed = seed
        self._groups_of, self._seeded_samples = groups, seeded_samples
        self._pass: tuple[int, int] | None = None
        self._groups: Iterator[list[Any]] = iter(())
        self._group: list[Any] = []
        self._step = -1  # step of the pass that the group belongs to
        self._holder: Any = None  # dataset or iterator with a state dict
        self._next_state_seconds = 0.0
        self._skip: Resume | None = None
        self._is_new = True  # whether nothing of the pass has been read
        self._digest: int | None = None

    def cut(self, dataset: Any, place: Place) -> Cut:
        """Return this rank's samples of a micro-batch, with information about its step."""
        with _without_worker_info():
            if (place.turn, place.key) != self._pass:
                self._start(dataset, place)
            skipped = self._read_to(place.step - place.begin)
            last = place.micro == self.plan.accumulation - 1
            state = self._state() if last and self._group and self.rank == 0 else None
        samples, slices = len(self._group), self.plan.slices
        index = place.micro * self.plan.replicas + self.rank
        begin, end = samples * index // slices, samples * (index + 1) // slices
        chosen = self._group[begin : max(end, begin + 1)]  # an empty slice still reads one sample, at weight 0
        digest, self._digest = self._digest, None
        seed_generators(mix(self.seed, place.key, place.step, index))  # for a random collate function
        return Cut(place._replace(resume=None), chosen, samples, state, digest, skipped)

    def _start(self, dataset: Any, place: Place) -> None:
        self._pass = (place.turn, place.key)
        self._is_new = True
        seed_generators(mix(self.seed, place.key))
        if callable(set_epoch := getattr(dataset, "set_epoch", None)):
            set_epoch(place.epoch)
        samples, step = self._opened(dataset, place.resume)
        self._skip = place.resume if place.resume and place.resume.step > step else None
        self._step = step - 1
        block = step * self.plan.global_batch // self._seeded_samples
        self._groups = self._groups_of(_seeded(samples, self._seeded_samples, block, self.seed, place.key))

    def _opened(self, dataset: Any, resume: Resume | None) -> tuple[Iterator[Any], int]:
        """Return an iterator over the stream, and the step of the pass at which it begins."""
        state = None if resume is None else unpacked(resume.state)
        if state is not None and _is_stateful(dataset):
            dataset.load_state_dict(state)
        samples = iter(dataset)
        self._holder = next((one for one in (dataset, samples) if _is_stateful(one)), None)
        if resume is None or state is None or self._holder is None:
            return samples, 0
        if self._holder is samples:
            self._holder.load_state_dict(state)
        return samples, resume.state_step

    def _read_to(self, step: int) -> tuple[int, float] | None:
        """Read up to a step of the pass; return the samples that a resumed run has skipped and the seconds, or None."""
        began = perf_counter()
        first, skip, self._skip = self._step + 1, self._skip, None
        while self._step < step:
            self._group = next(self._groups, [])
            self._step += 1
            if self._is_new:
                self._is_new, self._digest = False, content_digest(self._group[:_COMPARED_SAMPLES])
        if skip is None or not self._group:
            return None
        return (skip.step - first) * self.plan.global_batch, perf_counter() - began

    def _state(self) -> Any:
        now = perf_counter()
        if self._holder is None or now < self._next_state_seconds:
            return None
        try:
            return packed(self._holder.state_dict())
        except TypeError as error:
            self._holder = None
            return UnsavableState(str(error))
        finally:
            seconds = perf_counter() - now
            self._next_state_seconds = now + seconds / _STATE_SHARE


def _seeded(samples: Iterator[Any], every_samples: int, block: int, seed: int, key: int) -> Iterator[Any]:
    """Yield samples, and seed the generators before each block of them."""
    while True:
        seed_generators(mix(seed, key, block))
        for _ in range(every_samples):
            try:
                yield next(samples)
            except StopIteration:
                return
        block += 1


@contextmanager
def _without_worker_info() -> Iterator[None]:
    """Hide the worker's info, so that a dataset that splits itself by worker yields its whole stream."""
    if (worker := get_worker_info()) is None:
        yield
        return
    patches.replace(_utils.worker, "_worker_info", None)
    try:
        yield
    finally:
        patches.replace(_utils.worker, "_worker_info", worker)


def _is_stateful(holder: Any) -> bool:
    """Return whether an object can save its state and resume from it at the exact sample."""
    is_able = all(callable(getattr(holder, name, None)) for name in ("state_dict", "load_state_dict"))
    return is_able and not _loses_a_buffer(getattr(holder, "_ex_iterable", None))


def _loses_a_buffer(part: Any) -> bool:
    """Return whether a Hugging Face dataset, or a part of it, shuffles in a buffer that its state omits."""
    inner = [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
    known = type(part).__name__ == "BufferShuffledExamplesIterable"
    return known or any(_loses_a_buffer(one) for one in inner if one is not None)


def packed(state: Any) -> Any:
    """Return a copy of a state in plain types and tensors.

    Raises:
        TypeError: the state holds an object of another type, whose name is the message.
    """
    if state is None or type(state) in _PLAIN:
        return state
    if isinstance(state, torch.Tensor):
        return state.detach().cpu().clone()
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, np.ndarray) and state.dtype.kind in "biuf" and state.dtype.isnative:
        return {_ARRAY: torch.from_numpy(state.copy()), "dtype": state.dtype.str}
    if isinstance(state, dict):
        return {packed(key): packed(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(packed(value) for value in state)
    raise TypeError(type(state).__name__)


def unpacked(state: Any) -> Any:
    """Return the state that `packed` has converted."""
    if isinstance(state, dict):
        if state.keys() == {_ARRAY, "dtype"}:
            return state[_ARRAY].numpy().astype(state["dtype"])
        return {key: unpacked(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(unpacked(value) for value in state)
    return state
