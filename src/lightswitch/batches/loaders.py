"""Copies of a run's data loaders in which each rank reads its share of the samples."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightswitch.batches.combined import Combined
from lightswitch.batches.evaluation import EvaluationBatches, shares
from lightswitch.batches.formed import FormedSlices, formed_rounds
from lightswitch.batches.order import (
    TrainingSlices,
    sampler_of,
    samples_of,
    unwrapped,
)
from lightswitch.batches.plan import BatchPlan, Position
from lightswitch.batches.rank_loader import RankLoader, copy_of_loader, evaluation_stream, training_stream
from lightswitch.batches.stand_ins import EvaluatedSamples, SeededSamples, takes_one
from lightswitch.errors import Refused

log = logging.getLogger(__name__)
_OF_TORCHDATA = ("torchdata.stateful_dataloader.sampler", "BatchSampler")


class SharedLoaders:
    """Data loaders of a run: copies in which each rank reads its share of the samples, or the unchanged loaders.

    Args:
        seed: seed of the sample order and of augmentation.
        shares_streams: treat an IterableDataset as one stream for all ranks; otherwise it splits itself, and its
            loaders stay unchanged.
    """

    def __init__(self, plan: BatchPlan, seed: int, shares_streams: bool) -> None:
        self._plan = plan
        self._seed = seed
        self._shares_streams = shares_streams
        self._start = Position()
        self._states: Sequence[Any] = ()  # of the training streams in the checkpoint
        self._is_complete = True  # the set of training loaders; the next one starts a new set
        self._told_limits: set[str] = set()
        self._is_compared = False  # the samples that the ranks draw in this epoch
        self._earlier: Any = None  # Lightning's combined loader before this set; it may re-create loaders at any time
        self.training = Combined()

    def start_at(self, position: Position, states: Sequence[Any]) -> None:
        """Set the position at which training loaders begin, including those that are created later.

        Args:
            states: results of `states_at` at that position, in the order of loaders.
        """
        self._start, self._states = position, states
        self._start_slices()

    def start_epoch(self, epoch: int) -> None:
        """Mark the set of training loaders as complete, and pass the epoch to the datasets of unchanged loaders."""
        self._is_complete, self._is_compared = True, False
        for loader in self.training.others:
            _set_epoch(loader, epoch)

    def note_replaced(self, trainer: Trainer) -> None:
        """Report, at an epoch's start, training loaders that the module has replaced, which now run unchanged."""
        combined, ours = trainer.fit_loop._combined_loader, self.training.slices
        loaders = [] if combined is None or not ours else combined.flattened
        if all(getattr(one, "batch_sampler", None) in ours or isinstance(one, RankLoader) for one in loaders):
            return
        _say_what_does_not_hold(trainer, "the module has replaced it", training=True, splits=False)
        self.training = Combined(lambda: _mode(trainer))
        for loader in loaders:
            self.training.add_other(loader)

    def compare_ranks(self, trainer: Trainer) -> None:
        """Check, once an epoch, that all ranks draw the same samples. Collective, after an epoch's first batch is read.

        Raises:
            Refused: they draw others.
        """
        if not self._is_compared:
            _compare(trainer, self.training.digest, "a training set", self.training.is_formed)
        self._is_compared = True
        self._states = ()  # of this epoch's loaders, not of those that are created anew in a later one

    def states_at(self, step: int) -> list[Any]:
        """Return the states of training loaders for a resume at a step of this epoch."""
        return [slices.state_at(step) for slices in self.training.slices]

    def share(self, trainer: Trainer, loader: Any) -> object:
        """Return a copy of a loader that reads this rank's share of the samples, or the loader if it can't be copied.

        Raises:
            Refused: there are too few samples, or a scheduler needs the length of a stream that has none.
        """
        if isinstance(loader, list) and not loader:  # no loader at all: Lightning hands over the list itself
            return loader
        is_training = trainer.state.stage == RunningStage.TRAINING
        if is_training and (self._is_complete or trainer.fit_loop._combined_loader is not self._earlier):
            self.training, self._is_complete = Combined(lambda: _mode(trainer)), False
            self._earlier = trainer.fit_loop._combined_loader
        cannot = obstacle(loader)
        if (reason := cannot or self._split(loader)) is not None:
            if is_training:
                self.training.add_other(loader)
                _set_epoch(loader, self._start.epoch)
            _say_what_does_not_hold(trainer, reason, is_training, splits=cannot is None)
            return loader
        return self._made_anew(trainer, loader, is_training)

    def _split(self, loader: Any) -> str | None:
        """Return why a stream, or a batch sampler, is expected to split itself by rank; None if it isn't."""
        if not is_stream(loader):
            splits = _forms_batches(loader) and not self._shares_streams
            return "its batch sampler splits the samples by rank (data.sharded_by=dataset)" if splits else None
        if getattr(loader.dataset, "_distributed", None) is not None:  # Hugging Face's split_dataset_by_node
            return "its dataset splits itself by rank"
        return None if self._shares_streams else "its dataset splits itself by rank (data.sharded_by=dataset)"

    def _made_anew(self, trainer: Trainer, loader: DataLoader[Any], is_training: bool) -> DataLoader[Any]:
        plan, rank, gather = self._plan, data_rank(trainer), functools.partial(_gather, trainer)
        if plan.micro_batch > 1 and is_training and not _forms_batches(loader) and takes_one(loader):
            raise Refused(
                "the collate_fn of a training loader returns the first of a batch's samples and drops the others, as "
                "if each were a batch; type micro_batch_size=1, and global_batch_size=N for N of them in a step"
            )
        pins = trainer.strategy.root_device.type == "cuda"
        if not is_training:
            self._say_what_a_limit_means(trainer, loader)
            if is_stream(loader):
                return evaluation_stream(loader, plan, rank, self._seed, gather, pins)
            evaluated = evaluation_loader(loader, plan, rank, self._seed, pins)
            order: EvaluationBatches = unwrapped(evaluated.batch_sampler)
            _compare(trainer, order.digest(loader.dataset), "an evaluation set", _forms_batches(loader))
            return evaluated
        if trainer.global_rank == 0 and not _forms_batches(loader):
            _tell_replaced(unwrapped(loader.batch_sampler).batch_size, plan)
        if not is_stream(loader):
            shared: RankLoader = training_loader(loader, plan, rank, self._seed, self._start, self.training, pins)
            self.training.note_batches(shared.makes_batches)
            self._start_slices()
            return shared
        shared = training_stream(loader, plan, rank, self._seed, self._start, gather, self.training, pins)
        self._start_slices()
        self._check_length(trainer)
        if trainer.global_rank == 0 and (readers := plan.replicas * max(1, loader.num_workers)) > 1:
            log.info(
                "stream     %d readers, %d for each device: each reads the whole stream and uses only its share",
                readers, max(1, loader.num_workers),
            )  # fmt: skip
        return shared

    def _say_what_a_limit_means(self, trainer: Trainer, loader: DataLoader[Any]) -> None:
        """Log, once a stage, that a limit counts batches of a device, whose samples depend on how a batch is split."""
        assert trainer.state.stage is not None
        name = f"limit_{trainer.state.stage.dataloader_prefix}_batches"
        limit, plan, own = getattr(trainer, name), self._plan, loader.batch_size or self._plan.micro_batch
        is_split = plan.replicas > 1 or plan.micro_batch < own
        is_whole = limit == 0 or (limit == 1.0 and isinstance(limit, float))
        if is_whole or not is_split or name in self._told_limits:
            return
        self._told_limits.add(name)
        if trainer.global_rank == 0:
            log.info(
                "limit      trainer.%s=%s counts the batches of each device, %d × up to %d samples at once: other "
                "numbers of devices, or another micro_batch_size, evaluate other samples",
                name, limit, plan.replicas, min(own, plan.micro_batch),
            )  # fmt: skip

    def _check_length(self, trainer: Trainer) -> None:
        if not self.training.is_sized and trainer.max_steps == -1 and not trainer.optimizers:
            raise Refused(
                "a schedule of the module needs the number of steps, but the training stream has no len(), so "
                "trainer.max_epochs does not limit the steps; type trainer.max_steps=N, or give the dataset a __len__"
            )

    def _start_slices(self) -> None:
        states = [*self._states, *(None for _ in self.training.slices)]
        for slices, state in zip(self.training.slices, states, strict=False):
            slices.start_at(self._start.epoch, self._start.step, state)


def data_rank(trainer: Trainer) -> int:
    """Return this process's data-parallel rank.

    Ranks that hold one layer together (tensor parallelism) have the same one: they read the same samples and drop the
    same units in dropout.
    """
    return int((trainer.distributed_sampler_kwargs or {}).get("rank", 0))


def _gather(trainer: Trainer, number: int) -> list[int]:
    """Return the numbers of all ranks, in rank order. Collective."""
    if trainer.world_size == 1:
        return [number]
    own = torch.tensor(number, device=trainer.strategy.root_device)
    gathered = [torch.empty_like(own) for _ in range(trainer.world_size)]
    torch.distributed.all_gather(gathered, own)
    return [int(one) for one in gathered]


def _compare(trainer: Trainer, digest: int, of: str, is_formed: bool) -> None:
    """Check that all ranks draw the same samples of a set, given a digest of them. Collective.

    Raises:
        Refused: they draw others.
    """
    if len(set(_gather(trainer, digest))) > 1:
        split = "; if its batch sampler splits them by rank, type data.sharded_by=dataset" if is_formed else ""
        raise Refused(
            f"the ranks draw different samples of {of} that they should share: let what splits, weights or shuffles it "
            "draw from the global generators of torch, NumPy and Python, or from one with a seed, and follow nothing "
            f"that one rank alone has seen{split}"
        )


def _tell_replaced(own: int, plan: BatchPlan) -> None:
    if own not in (1, plan.micro_batch, plan.global_batch):  # 1 is torch's default
        log.info(
            "batch      %d, of which a loader makes its batches, is replaced by the global batch of %d; to use it, "
            "type global_batch_size=%d",
            own, plan.global_batch, own,
        )  # fmt: skip


def _set_epoch(loader: object, epoch: int) -> None:
    """Pass the epoch to a loader's dataset if it has `set_epoch`, for example to shuffle by it."""
    set_epoch = getattr(getattr(loader, "dataset", None), "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def _mode(trainer: Trainer) -> str:
    assert trainer.fit_loop._combined_loader is not None
    return trainer.fit_loop._combined_loader._mode


def _say_what_does_not_hold(trainer: Trainer, reason: str, training: bool, splits: bool) -> None:
    if splits:
        lost = (
            "the samples of a step depend on the dataset and the number of devices, a resumed run restarts its epoch, "
            "and all ranks must end at the same batch; weights and checkpoints are not affected"
            if training
            else "the samples that each rank evaluates depend on the dataset"
        )
    elif training:
        lost = "it sets its own batch size and order, and a resumed run restarts its epoch"
        shared = "; every rank reads the same samples unless the loader splits them" if trainer.world_size > 1 else ""
        lost += shared
    else:
        lost = "samples may be counted twice" if trainer.world_size > 1 else ""
    if lost and trainer.global_rank == 0:
        log.warning("this data loader is left unchanged because %s: %s", reason, lost)


def obstacle(loader: object) -> str | None:
    """Return why a loader can't be copied, as text for the user; None if it can."""
    if not isinstance(loader, DataLoader):
        return f"it is a {type(loader).__name__}, not a torch DataLoader"
    if loader.batch_sampler is None:
        return "it has batch_size=None, so its dataset makes the batches"
    if is_stream(loader):
        return None
    if _forms_batches(loader):
        forms = unwrapped(loader.batch_sampler)
        return None if sized_len(forms) is not None else f"its batch sampler, {type(forms).__name__}, has no len()"
    if sized_len(sampler := unwrapped(loader.batch_sampler).sampler) is None:
        return f"its sampler, {type(sampler).__name__}, has no len()"
    return None


def is_stream(loader: DataLoader[Any]) -> bool:
    """Return whether the dataset alone determines the order of a loader's samples."""
    return isinstance(loader.dataset, IterableDataset)


def training_loader(
    loader: DataLoader[Any],
    plan: BatchPlan,
    rank: int,
    seed: int,
    at: Position,
    combined: Combined | None = None,
    pins_for_gpu: bool = False,
) -> RankLoader:
    """Return a copy of a DataLoader that reads this rank's slices of each global batch.

    Args:
        loader: a map-style loader (see `obstacle`).
        rank: this process's data-parallel rank.
        seed: seed of the sample order and of augmentation.
        at: the position to start from.
        combined: the other training loaders of the run; None if there are none.
        pins_for_gpu: see `lightswitch.batches.rank_loader.RankLoader`.

    Raises:
        Refused: `drop_last` drops all samples, or there are none.
    """
    samples_of_epoch = SeededSamples(loader.dataset, seed, loader.collate_fn)
    copied = functools.partial(copy_of_loader, RankLoader, loader, samples_of_epoch, pins_for_gpu=pins_for_gpu)
    if _forms_batches(loader):
        forms = unwrapped(loader.batch_sampler)
        return copied(batch_sampler=FormedSlices(forms, plan, rank, seed, at, combined, loader.dataset))
    base = sampler_of(loader)
    samples = samples_of(base, loader.dataset)
    drop_last = bool(unwrapped(loader.batch_sampler).drop_last)
    if not samples:
        raise Refused("the training set has no samples")
    if drop_last and samples < plan.global_batch:
        raise Refused(
            f"the training set has {samples} samples and its loader drops the last batch, so no batch of "
            f"global_batch_size={plan.global_batch} remains; use global_batch_size={samples} or fewer"
        )
    slices = TrainingSlices(base, samples, drop_last, plan, rank, seed, at.epoch, at.step, combined, loader.dataset)
    return copied(batch_sampler=slices)


def evaluation_loader(
    loader: DataLoader[Any],
    plan: BatchPlan,
    rank: int,
    seed: int,
    pins_for_gpu: bool = False,
) -> RankLoader:
    """Return a copy of a DataLoader that reads this rank's share of the samples, each once over all ranks.

    A batch is at most as large as the loader's batch size and a micro-batch, or as a batch sampler forms it. The
    arguments are those of `training_loader`.

    Raises:
        Refused: there are no samples.
    """
    slices, given = _evaluated(loader, plan, rank, seed), loader.batch_sampler
    wrap: Any = type(given)
    if given is not unwrapped(given):  # in Lightning's wrapper, which records the predicted indices
        slices = wrap(slices)
    evaluated = EvaluatedSamples(loader.dataset, seed, loader.collate_fn)
    return copy_of_loader(RankLoader, loader, evaluated, pins_for_gpu=pins_for_gpu, batch_sampler=slices)


def _evaluated(loader: DataLoader[Any], plan: BatchPlan, rank: int, seed: int) -> EvaluationBatches:
    if _forms_batches(loader):
        return formed_rounds(unwrapped(loader.batch_sampler), plan.replicas, rank, seed, loader.dataset)
    sampler = sampler_of(loader)
    samples = samples_of(sampler, loader.dataset)
    if not samples:
        raise Refused("an evaluation set has no samples; leave its loader out")
    batch = min(unwrapped(loader.batch_sampler).batch_size, plan.micro_batch)
    return shares(sampler, samples, batch, plan.replicas, rank, seed)


def _forms_batches(loader: DataLoader[Any]) -> bool:
    """Return whether a batch sampler chooses what a batch consists of; torch's and torchdata's only group samples."""
    kind = type(unwrapped(loader.batch_sampler))
    return kind is not BatchSampler and (kind.__module__, kind.__name__) != _OF_TORCHDATA
