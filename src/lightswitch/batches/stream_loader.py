"""DataLoaders over a stream, re-made from outside so that they read this rank's share of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader

from lightswitch.batches.combined import Combined
from lightswitch.batches.plan import BatchPlan
from lightswitch.batches.position import Position
from lightswitch.batches.rank_loader import OwnLength, RankLoader, made_anew
from lightswitch.batches.stream import Cursor, Cut, Reader, Unkept, global_batches, rounds
from lightswitch.batches.stream_slices import StreamRounds, StreamSlices
from lightswitch.errors import Refused

log = logging.getLogger(__name__)

Gather = Callable[[int], list[int]]  # what each rank has, in the order of ranks


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
    """Return another DataLoader over an IterableDataset that reads this rank's slices of each global batch.

    Each of its processes reads the whole stream. The arguments are those of
    `lightswitch.batches.loaders.training_loader`.

    Args:
        gather: collective, called with the first batch.
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
    """Return another DataLoader over an IterableDataset that reads this rank's share of the samples.

    Each sample is read once over all ranks, and ranks make equally many batches: in turns, as the end is not known.
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
    return made_anew(StreamLoader, loader, reader, slices, received, pins_for_gpu)


class BatchesAlone:
    """Loader that refuses to yield a `Cut` in place of its batch, which the user's own class may have passed on."""

    def __iter__(self) -> Any:
        return map(self._batch, super().__iter__())  # type: ignore[misc]  # of the loader that this is mixed into

    def _batch(self, batch: Any) -> Any:
        if isinstance(batch, Cut):
            raise Refused(
                f"a stream's data loader, {type(self).__name__}, has an __iter__ that does not call torch's by "
                "super().__iter__(); use torch's DataLoader, or data.sharded_by=dataset to run it as it is"
            )
        return batch


class StreamLoader(RankLoader):
    """DataLoader whose readers send what training is to know of a stream beside each batch."""

    before_own = (BatchesAlone, OwnLength)

    def __init__(
        self, given: DataLoader[Any], reader: Reader, slices: Any, received: Received, pins_for_gpu: bool
    ) -> None:
        super().__init__(given, reader, Collate(given.collate_fn), pins_for_gpu, batch_size=None, sampler=slices)
        self._received = received

    def __iter__(self) -> Any:
        return self._received.batches(super().__iter__())


class Collate:
    """Collation of a cut's samples, which leaves alone what is beside them."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, cut: Cut) -> Cut:
        return cut._replace(batch=self.collate(cut.batch)) if cut.samples else cut


class Received:
    """Receiver of what a loader's readers send: it hands on the batches, and keeps what is beside them.

    Args:
        gather: see `training_stream`.
    """

    def __init__(self, slices: StreamSlices | StreamRounds, gather: Gather) -> None:
        self._slices = slices
        self._gather = gather
        self._digests: dict[tuple[int, int], int] = {}  # of the current pass
        self._told: set[str] = set()

    def batches(self, cuts: Iterator[Cut]) -> Iterator[Any]:
        """Yield batches, up to where the stream ends."""
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
        if isinstance(cut.state, Unkept):
            self._tell(
                f"the stream's state holds a {cut.state.kind}, which a checkpoint can't keep: a resumed run reads the "
                "stream up to its place"
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
        """Check that all readers begin with the same samples: the ranks at the first batch, this one's at any.

        Raises:
            Refused: they do not.
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
                f"{which} different samples of a stream that they are to share: if its dataset splits itself, type "
                "data.sharded_by=dataset; else let it draw from the generators of torch, NumPy and Python, or from "
                "one that set_epoch seeds"
            )

    def _tell_skipped(self, samples: int, seconds: float) -> None:
        self._tell(
            f"skipped    {samples:,} samples of a stream in {seconds:.1f} s, to go on where the run stood; a "
            "dataset with state_dict and load_state_dict goes on at once"
        )

    @rank_zero_only
    def _tell(self, line: str) -> None:
        key = line.split()[0]
        if key not in self._told:
            self._told.add(key)
            log.info("%s", line)
