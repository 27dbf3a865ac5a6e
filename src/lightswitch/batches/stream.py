"""Streams (an IterableDataset): each reading process reads all samples and selects its rank's slices.

A loader requests micro-batches from its readers by their `Place`, because torch sends indices also to persistent
workers. A reader sends each one with what it knows of its step (`Cut`), which the rank's batch sampler records.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice, repeat
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.data import sized_len
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, Sampler, _utils, get_worker_info

from lightswitch import patches
from lightswitch.batches.order import TrainingSlices, check_shared
from lightswitch.batches.plan import BatchPlan, RankShare, pieces
from lightswitch.batches.seeds import KeptGenerators, StandIn, content_digest, mix, seed_generators
from lightswitch.collectives import of_ranks
from lightswitch.errors import Refused

log = logging.getLogger(__name__)
_COMPARED_SAMPLES = 16  # first samples of a reader, whose digest is compared among readers
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_PLAIN = (type(None), bool, int, float, str, bytes)
_ENDLESS = sys.maxsize  # number of samples of a stream of unknown length
_UNFINISHED_STEPS = 2  # that a loader may be ahead of training, because Lightning prefetches one batch

Groups = Callable[[Iterator[Any]], Iterator[list[Any]]]


class Place(NamedTuple):
    """Position of a micro-batch in a stream."""

    turn: int  # number of the iteration over the loader; each begins at the stream's start, or where a run resumes
    epoch: int  # passed to the dataset's set_epoch
    key: int  # identifies the pass through the stream in its seeds
    begin: int  # steps of the epoch before this pass
    step: int  # of the epoch
    micro: int
    resume: tuple[int, Any] | None = None  # a step of the pass and the dataset's state there; only in a reader's first


class Cut(NamedTuple):
    """Micro-batch that a reader sends to training, with information about its step."""

    place: Place
    batch: Any  # a list of samples; after collation, its result
    samples: int  # of the whole step, over all ranks; 0 if the stream has ended
    state: Any = None  # state of the dataset after this step, if a checkpoint can store it
    digest: int | None = None  # of this reader's first samples in a pass; only with its first micro-batch


def training_stream(
    loader: DataLoader[Any], share: RankShare, combined: Any = None
) -> tuple[StreamSlices, IndexedStream]:
    """Return the places of a rank's micro-batches, and what reads them. Arguments: `loaders.training_loader`."""
    size = share.plan.global_batch
    groups = partial(_global_batches, size=size, drop_last=bool(loader.drop_last))
    return StreamSlices(loader, share, combined), IndexedStream(loader.dataset, share, groups, seeded_samples=size)


def evaluated_stream(loader: DataLoader[Any], share: RankShare) -> tuple[StreamRounds, IndexedStream]:
    """Return the places of a rank's batches in an evaluation, and what reads them.

    All ranks together read each sample once, and make the same number of batches. They take turns, because the stream's
    end is not known in advance.
    """
    micro_batch, replicas = share.plan.micro_batch, share.plan.replicas
    batch = min(loader.batch_size or micro_batch, micro_batch)
    of_round = BatchPlan(batch * replicas, batch, replicas, 1)
    groups = partial(_rounds, size=of_round.global_batch, replicas=replicas)
    reader = IndexedStream(loader.dataset, replace(share, plan=of_round), groups, seeded_samples=1)
    return StreamRounds(of_round), reader


def _global_batches(samples: Iterator[Any], size: int, drop_last: bool) -> Iterator[list[Any]]:
    """Yield global batches, without reading samples ahead of the requested batch."""
    while (batch := list(islice(samples, size))) and (len(batch) == size or not drop_last):
        yield batch


def _rounds(samples: Iterator[Any], size: int, replicas: int) -> Iterator[list[Any]]:
    """Yield rounds: the samples that all ranks evaluate together, at least one for each rank.

    To ensure that, the last rounds are split into similar sizes. Fewer samples than ranks form one round, which is
    refused where it is received.
    """
    ahead = list(islice(samples, size + replicas))
    while len(ahead) == size + replicas:
        yield ahead[:size]
        ahead = ahead[size:] + list(islice(samples, size))
    if ahead:
        yield from map(list, pieces(ahead, max(1, min(-(-len(ahead) // size), len(ahead) // replicas))))


class StreamSlices(TrainingSlices):
    """Batch sampler of one rank: yields the places of its micro-batches until the stream ends.

    As with a map-style dataset, a micro-batch is a slice of the k-th G samples of the stream, G being the global batch.
    """

    def __init__(self, loader: DataLoader[Any], share: RankShare, combined: Any) -> None:
        samples = sized_len(loader.dataset)
        self.is_sized = samples is not None
        self._drop_last = bool(loader.drop_last)
        self._readers = max(1, loader.num_workers)
        self._turn = 0
        self._short: tuple[Place, int] | None = None  # last step of the pass, if smaller, and its number of samples
        self._states: dict[int, Any] = {}  # of the dataset, by the number of the next step
        total = _ENDLESS if samples is None else samples
        super().__init__(share, None, total, self._drop_last, combined)

    @property
    def is_even(self) -> bool:
        if self.is_sized:
            return super().is_even
        return self.plan.is_even and (self._drop_last or self.plan.slices == 1)

    def _before(self, epoch: int, cycle: int, steps: int) -> int:
        if self._short is not None:
            place, samples = self._short
            if place.step - place.begin < steps:
                return (place.step - place.begin) * self.plan.global_batch + samples
        return super()._before(epoch, cycle, steps)

    def samples_of(self, step: int, micro: int) -> list[int]:
        """Return the positions in the stream, from 0, of this rank's samples in a micro-batch."""
        begin, end = self._bounds(step, micro)
        return list(range(begin, max(end, begin + 1)))

    def start_at(self, epoch: int, step: int, state: Mapping[str, Any] | None = None) -> None:
        super().start_at(epoch, step, state)
        if state is not None and state.get("step") == step > 0:  # a map-style loader's has none
            self._states[step] = state["state"]

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the state that a run needs to resume at a step of the epoch, with that of a dataset that has one."""
        return {**super().state_at(step), "step": step, "state": self._states.get(step)}

    def __iter__(self) -> Iterator[Any]:
        epoch, first = self.epoch, self._first_step()
        self._turn += 1
        skipped = first % self.own_steps  # steps of the pass that were taken before a resume
        state = self._states.get(first) if skipped else None
        self._short, self._states = None, {first: state}
        resume = None if state is None else (skipped, state)
        resumes = repeat(resume, self._readers)  # one for each reader: micro-batches go to readers in turn
        if skipped and state is None and self.share.rank == 0:
            log.info(
                "skipped    %s samples of a stream are read again, to resume at the same sample; a dataset with "
                "state_dict and load_state_dict resumes at once",
                f"{skipped * self.plan.global_batch:,}",
            )
        for step in range(first, self.steps):
            at_cycle = step // self.own_steps
            key, begin = self._pass_key(epoch, at_cycle), at_cycle * self.own_steps
            for micro in range(self.plan.accumulation):
                yield Place(self._turn, self._told_epoch(epoch, at_cycle), key, begin, step, micro, next(resumes, None))

    def note(self, cut: Cut) -> None:
        """Record the number of samples of a micro-batch's step, and the dataset's state after it."""
        step = cut.place.step
        if cut.samples < self.plan.global_batch:
            self._short = cut.place, cut.samples
        if cut.digest is not None:
            self._compare(str(cut.place.key), cut.digest)
        if cut.state is not None:
            self._states[step + 1] = cut.state
            self._states.pop(step - _UNFINISHED_STEPS, None)

    def end(self, cut: Cut) -> None:
        """Check that the stream ends after a step.

        Raises:
            Refused: it has no samples, or too few for one step with ``drop_last``.
        """
        if cut.place.step == cut.place.begin:
            size = f"fewer samples than global_batch_size={self.plan.global_batch}, and its loader drops the last batch"
            raise Refused(f"the training stream has {size if self._drop_last else 'no samples'}")


class StreamRounds(Sampler[Any]):
    """Batch sampler of an evaluation over a stream: yields the places of its rounds until the stream ends.

    Args:
        plan: plan of a round, without accumulation.
    """

    def __init__(self, plan: BatchPlan) -> None:
        self.plan = plan
        self.batch_size = plan.micro_batch
        self._turn = 0

    def __iter__(self) -> Iterator[Any]:
        self._turn += 1
        for step in range(_ENDLESS):
            yield Place(self._turn, 0, 0, 0, step, 0)

    def note(self, cut: Cut) -> None:
        """Check that each rank gets a sample of a round."""
        check_shared(cut.samples, self.plan.replicas)

    def end(self, cut: Cut) -> None:
        """Do nothing: all ranks have made the same number of batches."""


class IndexedStream(StandIn, Dataset[Any]):
    """Map-style dataset over a stream, indexed by `Place`, with the position of a reader in the stream.

    The generators of Python, NumPy and torch are seeded by the position, so that whatever the stream shuffles with them
    is the same for every reader, and after a resume.

    Args:
        groups: splits the stream into the samples that all ranks read in a step.
        seeded_samples: number of samples after which generators are seeded again.
    """

    def __init__(self, dataset: Any, share: RankShare, groups: Groups, seeded_samples: int) -> None:
        self._share = share
        self._groups_of, self._seeded_samples = groups, seeded_samples
        self._pass: tuple[int, int] | None = None
        self._groups: Iterator[list[Any]] = iter(())
        self._group: list[Any] = []
        self._step = -1  # step of the pass that the group belongs to
        self._is_stateful = False
        self._digest: int | None = None  # of the first samples of the pass, until they are sent
        self._is_new = True  # whether nothing of the pass has been read
        self.given = dataset

    def __getitem__(self, place: Place) -> Cut:
        """Return this rank's samples of a micro-batch, with information about its step."""
        share, plan = self._share, self._share.plan
        with _without_worker_info():
            if (place.turn, place.key) != self._pass:
                self._start(place)
            self._read_to(place.step - place.begin)
            last = place.micro == plan.accumulation - 1
            state = self._state() if last and self._group and share.rank == 0 else None
        begin, end = share.slice_of(len(self._group), place.micro)
        chosen = self._group[begin : max(end, begin + 1)]  # an empty slice still reads one sample, at weight 0
        digest, self._digest = self._digest, None
        index = place.micro * plan.replicas + share.rank
        seed_generators(mix(share.seed, place.key, place.step, index))  # for a random collate function
        return Cut(place._replace(resume=None), chosen, len(self._group), state, digest)

    def _start(self, place: Place) -> None:
        dataset, seed = self.given, self._share.seed
        self._pass, self._is_stateful = (place.turn, place.key), _is_stateful(dataset)
        self._is_new = place.resume is None
        seed_generators(mix(seed, place.key))
        if callable(set_epoch := getattr(dataset, "set_epoch", None)):
            set_epoch(place.epoch)
        step, state = place.resume or (0, None)
        if state is not None:
            dataset.load_state_dict(state)
        self._step = step - 1
        block = step * self._share.plan.global_batch // self._seeded_samples
        self._groups = self._groups_of(_seeded(iter(dataset), self._seeded_samples, block, seed, place.key))

    def _read_to(self, step: int) -> None:
        while self._step < step:
            self._group = next(self._groups, [])
            self._step += 1
            if self._is_new:
                self._is_new, self._digest = False, content_digest(self._group[:_COMPARED_SAMPLES])

    def _state(self) -> Any:
        state = _copied(self.given.state_dict()) if self._is_stateful else None
        self._is_stateful = state is not None  # else a resumed run reads again what came before, and says so
        return state


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


def _is_stateful(dataset: Any) -> bool:
    """Return whether a dataset can save its state and resume from it at the exact sample.

    A `state_dict` that has to be told how much was read, as litdata's, says nothing by itself.
    """
    is_able = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
    needed = inspect.signature(dataset.state_dict).parameters.values() if is_able else ()
    is_able = is_able and all(one.kind in _ANY or one.default is not one.empty for one in needed)
    return is_able and not _loses_a_buffer(getattr(dataset, "_ex_iterable", None))


def _loses_a_buffer(part: Any) -> bool:
    """Return whether a Hugging Face dataset, or a part of it, shuffles in a buffer that its state omits."""
    inner = [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
    known = type(part).__name__ == "BufferShuffledExamplesIterable"
    return known or any(_loses_a_buffer(one) for one in inner if one is not None)


def _copied(state: Any) -> Any:
    """Return a copy of a state; None if a checkpoint can't store it: a part is neither plain nor a tensor."""
    if not all(type(leaf) in _PLAIN or isinstance(leaf, torch.Tensor) for leaf in tree_leaves(state)):
        return None
    return tree_map(lambda leaf: leaf.detach().cpu().clone() if isinstance(leaf, torch.Tensor) else leaf, state)


class StreamLoader(DataLoader[Any]):
    """Mixin for a DataLoader whose readers send information about the stream with each batch."""

    received: StreamReceiver

    def __iter__(self) -> Any:
        return self.received.batches(super().__iter__())


class StreamCollate:
    """Collate function for the samples of a `Cut`, whose other fields stay unchanged.

    The generators that the function keeps get the seed that the cursor has just given the global ones.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._kept = KeptGenerators(collate)

    def __call__(self, cut: Cut) -> Cut:
        if not cut.samples:
            return cut
        batch = self._kept.seeded(self._collate, [cut.batch], [torch.initial_seed()], cut.place.turn)[0]
        return cut._replace(batch=batch)


class StreamReceiver:
    """Receiver of the cuts that a loader's readers send: it yields the batches and records the other fields.

    Args:
        slices: those of the loader.
    """

    def __init__(self, slices: StreamSlices | StreamRounds) -> None:
        self._slices = slices
        self._pass: tuple[int, int] | None = None  # by turn and key
        self._digest = 0  # of the first samples of the pass

    def batches(self, cuts: Iterator[Cut]) -> Iterator[Any]:
        """Yield batches until the stream ends."""
        for cut in cuts:
            if not cut.samples:
                self._slices.end(cut)
                return
            if cut.digest is not None:
                self._compare(cut.digest, (cut.place.turn, cut.place.key))
            self._slices.note(cut)
            yield cut.batch

    def _compare(self, digest: int, of_pass: tuple[int, int]) -> None:
        """Check that all readers begin with the same samples: all ranks once, and this rank's workers in each pass.

        Raises:
            Refused: the samples differ.
        """
        if of_pass == self._pass:
            others, which = [self._digest, digest], "the workers of a data loader read"
        else:
            others, which = of_ranks(digest) if self._pass is None else [digest], "the ranks read"
            self._pass, self._digest = of_pass, digest
        if len(set(others)) > 1:
            raise Refused(
                f"{which} different samples of a stream that they should share: if its dataset splits itself, type "
                "data.sharded_by=dataset; otherwise, let it draw from the global generators of torch, NumPy and "
                "Python, or from one that set_epoch seeds"
            )
