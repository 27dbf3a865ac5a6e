"""Copies of DataLoaders in which each rank reads its share of a dataset or a stream."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import rank_zero_only
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader

from lightswitch.batches.combined import Combined
from lightswitch.batches.order import check_shared
from lightswitch.batches.plan import BatchPlan, Position
from lightswitch.batches.stand_ins import KeptGenerators, takes_one
from lightswitch.batches.stream import (
    Cursor,
    Cut,
    IndexedStream,
    UnsavableState,
    global_batches,
    rounds,
)
from lightswitch.batches.stream_slices import StreamRounds, StreamSlices
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
        makes_batches: each sample of its dataset is a batch.
    """

    def __init__(
        self,
        given: DataLoader[Any],
        dataset: Any,
        collate_fn: Callable[[Any], Any] | None = None,
        pins_for_gpu: bool = False,
        **order: Any,
    ) -> None:
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
        self.makes_batches = takes_one(given)
        of_users_class = {name: value for name, value in vars(given).items() if name not in vars(self)}
        # what users read, and DataLoader's constructor resets when it gets a batch sampler
        shown = {name: getattr(given, name) for name in ("batch_size", "drop_last")}
        shown["sampler"] = order.get("sampler", order.get("batch_sampler"))
        vars(self).update(of_users_class | shown)


def copy_of_loader(kind: type[_Kind], given: DataLoader[Any], *arguments: Any, **named: Any) -> _Kind:
    """Return a loader of the class `kind`, in which methods of the given loader's class take precedence.

    The constructor of that class, which may take other arguments, is not called. The result has no state dict, even if
    the given loader has one, as torchdata's does: Lightning would resume from it in addition to the run's position.
    """
    own = type(given)
    if own is DataLoader or (own.__module__, own.__name__) == _TORCHDATA:
        return kind(given, *arguments, **named)
    without = dict.fromkeys(("state_dict", "load_state_dict"))  # None marks a method that a class does not implement
    both = type(own.__name__, (OwnLength, own, kind), {"__init__": kind.__init__, **without})
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
    loader: DataLoader[Any],
    plan: BatchPlan,
    rank: int,
    seed: int,
    gather: Gather,
    pins_for_gpu: bool = False,
) -> StreamLoader:
    """Return a copy of a DataLoader over an IterableDataset that reads this rank's share of the samples.

    All ranks together read each sample once, and make the same number of batches. They take turns, because the stream's
    end is not known in advance.
    """
    batch, samples = min(loader.batch_size or plan.micro_batch, plan.micro_batch), sized_len(loader.dataset)
    of_round = BatchPlan(batch * plan.replicas, batch, plan.replicas, 1)
    slices = StreamRounds(samples, of_round)
    groups = partial(rounds, size=of_round.global_batch, replicas=plan.replicas)
    cursor = Cursor(of_round, rank, seed, groups, seeded_samples=1)
    return _shared(loader, slices, cursor, gather, pins_for_gpu)


def _shared(
    loader: DataLoader[Any], slices: StreamSlices | StreamRounds, cursor: Cursor, gather: Gather, pins_for_gpu: bool
) -> StreamLoader:
    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__ and (kind.__module__, kind.__name__) != _TORCHDATA:
        raise Refused(
            f"the data loader of a stream, {kind.__name__}, has an __iter__ of its own, which would get the engine's "
            "batches with their positions; use torch's DataLoader, or type data.sharded_by=dataset to leave the loader "
            "unchanged"
        )
    reader, received = IndexedStream(loader.dataset, cursor), Received(slices, gather)
    return copy_of_loader(StreamLoader, loader, reader, slices, received, pins_for_gpu)


class StreamLoader(RankLoader):
    """DataLoader whose readers send information about the stream with each batch."""

    def __init__(
        self, given: DataLoader[Any], reader: IndexedStream, slices: Any, received: Received, pins_for_gpu: bool
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
        batch = self._kept.seeded(self.collate, [cut.batch], [torch.initial_seed()], cut.place.turn)[0]
        return cut._replace(batch=batch, own_samples=len(cut.batch))


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
        elif isinstance(self._slices, StreamRounds):
            check_shared(cut.samples, self._slices.plan.replicas)
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
