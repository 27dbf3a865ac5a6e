"""Copies of DataLoaders in which each rank reads its share of a dataset or a stream."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import repeat
from typing import Any, ClassVar, TypeVar

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import rank_zero_only
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from lightswitch.batches.combined import Combined
from lightswitch.batches.generators import KeptGenerators
from lightswitch.batches.order import TrainingSlices
from lightswitch.batches.plan import BatchPlan, Position
from lightswitch.batches.stream import (
    Cursor,
    Cut,
    Place,
    Reader,
    Resume,
    UnsavableState,
    global_batches,
    last_rounds,
    rounds,
)
from lightswitch.errors import Refused

log = logging.getLogger(__name__)


_TORCHDATA = ("torchdata.stateful_dataloader.stateful_dataloader", "StatefulDataLoader")
_Kind = TypeVar("_Kind", bound="RankLoader")


class OwnLength:
    """Mixin that restores DataLoader's `__len__`; the user's class may derive another length from its batch size."""

    def __len__(self) -> int:
        return DataLoader.__len__(self)  # type: ignore[arg-type]  # mixed into DataLoaders


class RankLoader(DataLoader[Any]):
    """DataLoader that reads other samples than the given loader, and otherwise behaves like it.

    Args:
        given: the loader whose arguments and attributes are used.
        collate_fn: None for that of the given loader.
        pins_for_gpu: put batches into pinned memory, from which a GPU copies them asynchronously.
        order: the sampler arguments of DataLoader's constructor.

    Attributes:
        before_own: classes that precede the given loader's class in the method resolution order.
    """

    before_own: ClassVar[tuple[type, ...]] = (OwnLength,)

    def __init__(
        self,
        given: DataLoader[Any],
        dataset: Any,
        collate_fn: Callable[[Any], Any] | None = None,
        pins_for_gpu: bool = False,
        **order: Any,
    ) -> None:
        self._given = given
        # attributes that users read, but that DataLoader's constructor resets when it gets a batch sampler
        self._shown = {
            "sampler": order.get("sampler", order.get("batch_sampler")),
            "batch_size": given.batch_size,
            "drop_last": given.drop_last,
        }
        collate = collate_fn or given.collate_fn
        # A dataset in this process may return GPU tensors, which torch fails to pin. Workers can't return any.
        pins_here = pins_for_gpu and given.num_workers == 0
        super().__init__(
            dataset,
            collate_fn=_Pinning(collate) if pins_here else collate,
            pin_memory=(given.pin_memory or pins_for_gpu) and not pins_here,
            pin_memory_device=given.pin_memory_device,
            worker_init_fn=given.worker_init_fn,
            generator=given.generator,
            timeout=given.timeout,
            **_of_workers(given),
            **order,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, vars(self).get("_shown", {}).get(name, value))

    def __getattr__(self, name: str) -> Any:  # attributes set by the given loader's constructor, which is not called
        kept = vars(vars(self).get("_given", self))
        if name not in kept:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return kept[name]


def copy_of_loader(kind: type[_Kind], given: DataLoader[Any], *arguments: Any, **named: Any) -> _Kind:
    """Return a loader of the class `kind`, in which methods of the given loader's class take precedence.

    The constructor of that class, which may take other arguments, is not called. The result has no state dict, even if
    the given loader has one, as torchdata's does: Lightning would resume from it in addition to the run's position.
    """
    own = type(given)
    if own is DataLoader or (own.__module__, own.__name__) == _TORCHDATA:
        return kind(given, *arguments, **named)
    without = dict.fromkeys(("state_dict", "load_state_dict"))  # None marks a method that a class does not implement
    both = type(own.__name__, (*kind.before_own, own, kind), {"__init__": kind.__init__, **without})
    made: _Kind = both(given, *arguments, **named)
    return made


def _of_workers(given: DataLoader[Any]) -> dict[str, Any]:
    if given.num_workers == 0:  # torch rejects these arguments without workers
        return {}
    names = ("num_workers", "multiprocessing_context", "prefetch_factor", "persistent_workers")
    return {name: getattr(given, name) for name in names}


class _Pinning:
    """Collate function that returns tensors in pinned memory."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        return apply_to_collection(self.collate(samples), Tensor, _pinned)


def _pinned(tensor: Tensor) -> Tensor:
    return dense(tensor).pin_memory() if tensor.device.type == "cpu" and tensor.layout == torch.strided else tensor


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor without gaps between its elements, which CUDA can copy directly.

    CUDA first copies a view with gaps, such as `tokens[:, :-1]`, to memory that is not pinned, and waits for that copy.
    """
    strides = torch.empty_like(tensor, device="meta").stride()  # strides of a copy; a dense tensor has the same
    return tensor if tensor.stride() == strides else tensor.contiguous()


Gather = Callable[[int], list[int]]  # returns the numbers of all ranks, in rank order
_ENDLESS = sys.maxsize  # number of samples of a stream of unknown length
_UNFINISHED_STEPS = 2  # that a loader may be ahead of training, because Lightning prefetches one batch


def training_stream(
    loader: DataLoader[Any],
    plan: BatchPlan,
    rank: int,
    seed: int,
    at: Position,
    gather: Gather,
    combined: Combined | None = None,
    pins_for_gpu: bool = False,
) -> StreamLoader:
    """Return a copy of a DataLoader over an IterableDataset that reads this rank's slices of each global batch.

    Each of its processes reads the whole stream. For the other arguments, see
    `lightswitch.batches.loaders.training_loader`.

    Args:
        gather: collective function, called at the first batch.
    """
    samples, readers = sized_len(loader.dataset), max(1, loader.num_workers)
    drop_last = bool(loader.drop_last)
    slices = StreamSlices(samples, drop_last, plan, rank, seed, at, combined, readers)
    groups = partial(global_batches, size=plan.global_batch, drop_last=drop_last)
    cursor = Cursor(plan, rank, seed, groups, seeded_samples=plan.global_batch)
    return _shared(loader, slices, cursor, gather, pins_for_gpu)


def evaluation_stream(
    loader: DataLoader[Any], plan: BatchPlan, rank: int, seed: int, gather: Gather, pins_for_gpu: bool = False
) -> StreamLoader:
    """Return a copy of a DataLoader over an IterableDataset that reads this rank's share of the samples.

    All ranks together read each sample once, and make the same number of batches. They take turns, because the stream's
    end is not known in advance.
    """
    batch = min(loader.batch_size or plan.micro_batch, plan.micro_batch)
    of_round = BatchPlan(batch * plan.replicas, batch, plan.replicas, 1)
    slices = StreamRounds(sized_len(loader.dataset), of_round)
    groups = partial(rounds, size=of_round.global_batch, replicas=plan.replicas)
    cursor = Cursor(of_round, rank, seed, groups, seeded_samples=1)
    return _shared(loader, slices, cursor, gather, pins_for_gpu)


def _shared(
    loader: DataLoader[Any], slices: StreamSlices | StreamRounds, cursor: Cursor, gather: Gather, pins_for_gpu: bool
) -> StreamLoader:
    reader, received = Reader(loader.dataset, cursor), Received(slices, gather)
    return copy_of_loader(StreamLoader, loader, reader, slices, received, pins_for_gpu)


class BatchesAlone:
    """Mixin that refuses to yield a `Cut` in place of a batch, as happens if the user's `__iter__` bypasses torch's."""

    def __iter__(self) -> Any:
        return map(self._batch, super().__iter__())  # type: ignore[misc]  # of the DataLoader that this is mixed into

    def _batch(self, batch: Any) -> Any:
        if isinstance(batch, Cut):
            raise Refused(
                f"the data loader of a stream, {type(self).__name__}, has an __iter__ that does not call "
                "super().__iter__(); use torch's DataLoader, or type data.sharded_by=dataset to leave the loader "
                "unchanged"
            )
        return batch


class StreamLoader(RankLoader):
    """DataLoader whose readers send information about the stream with each batch."""

    before_own = (BatchesAlone, OwnLength)

    def __init__(
        self, given: DataLoader[Any], reader: Reader, slices: Any, received: Received, pins_for_gpu: bool
    ) -> None:
        super().__init__(given, reader, Collate(given.collate_fn), pins_for_gpu, batch_size=None, sampler=slices)
        self._received = received

    def __iter__(self) -> Any:
        return self._received.batches(super().__iter__())


class Collate:
    """Collate function for the samples of a `Cut`, whose other fields stay unchanged.

    The generators that the function keeps get the seed that the cursor has just given the global ones.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate
        self._kept = KeptGenerators(collate)

    def __call__(self, cut: Cut) -> Cut:
        if not cut.samples:
            return cut
        batch = self._kept.seeded(torch.initial_seed(), cut.place.turn, self.collate, cut.batch)
        return cut._replace(batch=batch)


class Received:
    """Receiver of the cuts that a loader's readers send: it yields the batches and records the other fields.

    Args:
        gather: see `training_stream`.
    """

    def __init__(self, slices: StreamSlices | StreamRounds, gather: Gather) -> None:
        self._slices = slices
        self._gather = gather
        self._digests: dict[tuple[int, int], int] = {}  # of the current pass
        self._told: set[str] = set()

    def batches(self, cuts: Iterator[Cut]) -> Iterator[Any]:
        """Yield batches until the stream ends."""
        for cut in cuts:
            if not cut.samples:
                self._slices.end(cut)
                return
            yield self._take(cut)

    def _take(self, cut: Cut) -> Any:
        if cut.digest is not None:
            self._compare(cut.digest, (cut.place.turn, cut.place.key))
        if cut.skipped is not None:
            self._tell_skipped(*cut.skipped)
        if isinstance(cut.state, UnsavableState):
            self._report(
                f"the stream's state contains a {cut.state.kind}, which a checkpoint can't store: a resumed run reads "
                "the stream again up to its position"
            )
            cut = cut._replace(state=None)
        elif cut.samples < self._slices.plan.replicas and isinstance(self._slices, StreamRounds):
            raise Refused(
                f"an evaluation set of {cut.samples} samples can't be shared by {self._slices.plan.replicas} devices; "
                "use fewer devices"
            )
        self._slices.note(cut)
        return cut.batch

    def _compare(self, digest: int, of_pass: tuple[int, int]) -> None:
        """Check that all readers begin with the same samples: all ranks once, and this rank's workers in each pass.

        Raises:
            Refused: the samples differ.
        """
        known = self._digests.get(of_pass)
        self._digests = {of_pass: digest}
        if known is not None:
            others, which = [known, digest], "the workers of a data loader read"
        elif "compared" not in self._told:
            self._told.add("compared")
            others, which = self._gather(digest), "the ranks read"
        else:
            return
        if len(set(others)) > 1:
            raise Refused(
                f"{which} different samples of a stream that they should share: if its dataset splits itself, type "
                "data.sharded_by=dataset; otherwise, let it draw from the global generators of torch, NumPy and "
                "Python, or from one that set_epoch seeds"
            )

    def _tell_skipped(self, samples: int, seconds: float) -> None:
        self._report(
            f"skipped    {samples:,} samples of a stream in {seconds:.1f} s, to resume at the same sample; a "
            "dataset with state_dict and load_state_dict resumes at once"
        )

    @rank_zero_only
    def _report(self, line: str) -> None:
        key = line.split()[0]
        if key not in self._told:
            self._told.add(key)
            log.info("%s", line)


class StreamSlices(TrainingSlices):
    """Batch sampler of one rank: yields the places of its micro-batches until the stream ends.

    As with a map-style dataset, a micro-batch is a slice of the k-th G samples of the stream, G being the global batch.

    Args:
        samples: the stream's ``len()``; None if it is unknown.
        readers: number of processes that read for this rank.
    """

    def __init__(
        self,
        samples: int | None,
        drop_last: bool,
        plan: BatchPlan,
        rank: int,
        seed: int,
        at: Position,
        combined: Combined | None,
        readers: int,
    ) -> None:
        self._is_sized = samples is not None
        self._drop_last = drop_last
        self._readers = readers
        self._turn = 0
        self._short: tuple[Place, int] | None = None  # last step of the pass, if smaller, and its number of samples
        self._states: dict[int, Any] = {}  # of the dataset, by the number of the next step
        self._continued: str | None = None  # pass that was resumed from a dataset state
        total = _ENDLESS if samples is None else samples
        super().__init__(None, total, drop_last, plan, rank, seed, at.epoch, at.step, combined)

    @property
    def is_sized(self) -> bool:
        return self._is_sized

    @property
    def is_even(self) -> bool:
        if self._is_sized:
            return super().is_even
        return self.plan.is_even and (self._drop_last or self.plan.slices == 1)

    @property
    def epoch_samples(self) -> int:
        if self._short is None:
            return super().epoch_samples
        place, samples = self._short
        return (place.step - place.begin) * self.plan.global_batch + samples

    def start_at(self, epoch: int, step: int, state: Mapping[str, Any] | None = None) -> None:
        super().start_at(epoch, step, state)
        self._kept = state

    def state_at(self, step: int) -> dict[str, Any] | None:
        """Return the state that a run needs to resume at a step of the epoch; None at the epoch's start.

        It also holds the dataset's state at the nearest known step up to this one, or step 0 and None if there is none.
        """
        nearest = max((one for one in self._states if one <= step), default=0)
        begins = super().state_at(step)
        return begins and {**begins, "step": nearest, "state": self._states.get(nearest)}

    def __iter__(self) -> Iterator[Any]:
        epoch, first = self.epoch, self._first_step()
        self._turn += 1
        self._short, self._states = None, {}
        resumes = repeat(self._resume(first), self._readers)  # one for each reader: micro-batches go to readers in turn
        for step in range(first, self.steps):
            cycle = step // self.own_steps
            key, begin = self._pass_key(epoch, cycle), cycle * self.own_steps
            for micro in range(self.plan.accumulation):
                yield Place(self._turn, self._told_epoch(epoch, cycle), key, begin, step, micro, next(resumes, None))

    def _resume(self, step: int) -> Resume | None:
        if step == 0:
            return None
        begin = step // self.own_steps * self.own_steps  # first step of the pass
        if self._kept is None or not begin < self._kept.get("step", 0) <= step:  # a map-style loader's has none
            return Resume(step - begin)
        self._states[self._kept["step"]] = self._kept["state"]
        self._continued = str(self._pass_key(self.epoch, step // self.own_steps))
        return Resume(step - begin, self._kept["step"] - begin, self._kept["state"])

    def note(self, cut: Cut) -> None:
        """Record the number of samples of a micro-batch's step, and the dataset's state after it."""
        step = cut.place.step
        if cut.samples < self.plan.global_batch:
            self._short = cut.place, cut.samples
        if cut.digest is not None and str(cut.place.key) != self._continued:
            self._compare(str(cut.place.key), cut.digest)
        if cut.state is None:
            return
        self._states[step + 1] = cut.state
        latest = max((one for one in self._states if one <= step + 1 - _UNFINISHED_STEPS), default=0)
        self._states = {one: state for one, state in self._states.items() if one >= latest}

    def end(self, cut: Cut) -> None:
        """Handle the end of the stream before a step; warn if the stream's ``len()`` is wrong.

        Raises:
            Refused: the stream has no samples, or too few for one step with ``drop_last``.
        """
        steps = cut.place.step - cut.place.begin
        if steps == 0 and self._drop_last:
            raise Refused(
                f"the training stream has fewer samples than global_batch_size={self.plan.global_batch}, and its "
                "loader drops the last batch; use a smaller global_batch_size"
            )
        if steps == 0:
            raise Refused("the training stream has no samples")
        if self._is_sized and self.rank == 0:
            log.warning(
                "a training stream has ended after %d samples, but its len() is %d: correct its dataset's __len__",
                self.epoch_samples if self._short else steps * self.plan.global_batch, self.samples,
            )  # fmt: skip

    def samples_of(self, step: int, micro: int) -> list[int]:
        """Return the positions in the stream, from 0, of this rank's samples in a micro-batch."""
        begin, end = self._bounds(step, micro)
        return list(range(begin, max(end, begin + 1)))

    def step_samples(self, step: int) -> int:
        if self._short is not None and step == self._short[0].step:
            return self._short[1]
        return self.plan.global_batch


class StreamRounds(Sampler[Any]):
    """Batch sampler of an evaluation over a stream: yields the places of its rounds until the stream ends.

    Args:
        samples: the stream's ``len()``; None if it is unknown.
        plan: plan of a round, without accumulation.
    """

    def __init__(self, samples: int | None, plan: BatchPlan) -> None:
        self.samples = samples
        self.plan = plan
        self.batch_size = plan.micro_batch
        self._turn = 0

    def __len__(self) -> int:
        if self.samples is None:
            raise TypeError("the length of the stream is unknown")
        size, replicas = self.plan.global_batch, self.plan.replicas
        whole = max(0, (self.samples - replicas) // size)
        return whole + last_rounds(self.samples - whole * size, size, replicas)

    def __iter__(self) -> Iterator[Any]:
        self._turn += 1
        for step in range(_ENDLESS):
            yield Place(self._turn, 0, 0, 0, step, 0)

    def note(self, cut: Cut) -> None:
        """Do nothing: in an evaluation, each batch counts with its own number of samples."""

    def end(self, cut: Cut) -> None:
        """Do nothing: all ranks have made the same number of batches."""
