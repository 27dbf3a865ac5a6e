"""Copies of a run's data loaders in which each rank reads its share of the samples."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import DataLoader, IterableDataset

from lightswitch.batches import stream
from lightswitch.batches.order import (
    EvaluationBatches,
    FormedSlices,
    TrainingSlices,
    forms_batches,
    sampler_of,
    unwrapped,
)
from lightswitch.batches.plan import BatchPlan, Position, RankShare
from lightswitch.batches.seeds import EvaluatedSamples, SeededSamples, mix, reads_batches
from lightswitch.collectives import of_ranks
from lightswitch.errors import Refused

log = logging.getLogger(__name__)
CYCLE = "max_size_cycle"  # Lightning's default for a list or a dict of loaders


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
        self._states: Sequence[Any] = ()  # of the training loaders in the checkpoint
        self._is_compared = False  # the samples that the ranks draw in this epoch
        self.training = Combined()

    def start_at(self, position: Position, states: Sequence[Any]) -> None:
        """Set the position at which training loaders begin, including those that are created later.

        Args:
            states: results of `states_at` at that position, in the order of loaders.
        """
        self._start, self._states = position, states
        self._start_slices()

    def _start_slices(self) -> None:
        states = [*self._states, *(None for _ in self.training.slices)]
        for slices, state in zip(self.training.slices, states, strict=False):
            slices.start_at(self._start.epoch, self._start.step, state)

    def start_set(self, trainer: Trainer) -> None:
        """Forget the training loaders, before Lightning requests new ones."""
        self.training = Combined(functools.partial(_mode, trainer))

    def start_epoch(self, epoch: int) -> None:
        """Let the ranks compare what they draw in this epoch, and pass it to the datasets of unchanged loaders."""
        self._is_compared = False
        for loader in self.training.others:
            _set_epoch(loader, epoch)

    def note_replaced(self, trainer: Trainer) -> None:
        """Report, at an epoch's start, training loaders that the module has replaced, which now run unchanged."""
        combined, ours = trainer.fit_loop._combined_loader, self.training.slices
        loaders = [] if combined is None or not ours else combined.flattened
        if all(_slices(one) in ours for one in loaders):
            return
        _say_what_does_not_hold(trainer, "the module has replaced it", training=True, splits=False)
        self.start_set(trainer)
        self.training.others += loaders

    def compare_ranks(self, trainer: Trainer) -> None:
        """Check, once an epoch, that all ranks draw the same samples. Collective, after an epoch's first batch is read.

        Raises:
            Refused: they draw others.
        """
        if not self._is_compared:
            _compare(self.training.digest, "a training set", self.training.is_formed)
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
        cannot = obstacle(loader)
        if (reason := cannot or self._split(loader)) is not None:
            if is_training:
                self.training.others.append(loader)
                _set_epoch(loader, self._start.epoch)
            _say_what_does_not_hold(trainer, reason, is_training, splits=cannot is None)
            return loader
        return self._training(trainer, loader) if is_training else self._evaluation(trainer, loader)

    def _split(self, loader: Any) -> str | None:
        """Return why a stream, or a batch sampler, is expected to split itself by rank; None if it isn't."""
        if not is_stream(loader):
            splits = forms_batches(loader) and not self._shares_streams
            return "its batch sampler splits the samples by rank (data.sharded_by=dataset)" if splits else None
        if getattr(loader.dataset, "_distributed", None) is not None:  # Hugging Face's split_dataset_by_node
            return "its dataset splits itself by rank"
        return None if self._shares_streams else "its dataset splits itself by rank (data.sharded_by=dataset)"

    def _training(self, trainer: Trainer, loader: DataLoader[Any]) -> DataLoader[Any]:
        plan, is_formed = self._plan, not is_stream(loader) and forms_batches(loader)
        if plan.micro_batch > 1 and not is_formed and takes_one(loader):
            raise Refused(
                "the collate_fn of a training loader returns the first of a batch's samples and drops the others, as "
                "if each were a batch; type micro_batch_size=1, and global_batch_size=N for N of them in a step"
            )
        own = None if is_formed else unwrapped(loader.batch_sampler).batch_size
        # 1 is torch's default
        if trainer.global_rank == 0 and own is not None and own not in (1, plan.micro_batch, plan.global_batch):
            log.info(
                "batch      %d, of which a loader makes its batches, is replaced by the global batch of %d; to use it, "
                "type global_batch_size=%d",
                own, plan.global_batch, own,
            )  # fmt: skip
        shared = training_loader(loader, self._of_rank(trainer), self.training, _pins(trainer))
        self._start_slices()
        if not self.training.is_sized and trainer.max_steps == -1 and not trainer.optimizers:
            raise Refused(
                "a schedule of the module needs the number of steps, but the training stream has no len(), so "
                "trainer.max_epochs does not limit the steps; type trainer.max_steps=N, or give the dataset a __len__"
            )
        return shared

    def _evaluation(self, trainer: Trainer, loader: DataLoader[Any]) -> DataLoader[Any]:
        evaluated = evaluation_loader(loader, self._of_rank(trainer), _pins(trainer))
        if isinstance(order := _slices(evaluated), EvaluationBatches):
            _compare(order.digest(loader.dataset), "an evaluation set", forms_batches(loader))
        return evaluated

    def _of_rank(self, trainer: Trainer) -> RankShare:
        return RankShare(self._plan, data_rank(trainer), self._seed)


def training_loader(
    loader: DataLoader[Any], share: RankShare, combined: Combined | None = None, pins_for_gpu: bool = False
) -> DataLoader[Any]:
    """Return a copy of a DataLoader that reads this rank's slices of each global batch.

    Args:
        loader: one that can be copied (see `obstacle`).
        combined: the training loaders of the run; None for this one alone.
        pins_for_gpu: let workers' batches be put into pinned memory, from which a GPU copies them asynchronously. A
            dataset in this process may return GPU tensors, which torch fails to pin.

    Raises:
        Refused: `drop_last` drops all samples, or there are none.
    """
    if is_stream(loader):
        return _of_stream(loader, *stream.training_stream(loader, share, combined), pins_for_gpu)
    read = SeededSamples(loader.dataset, share.seed, loader.collate_fn)
    if forms_batches(loader):
        order: TrainingSlices = FormedSlices(share, unwrapped(loader.batch_sampler), combined, loader.dataset)
        return sliced(loader, read, pins_for_gpu, batch_sampler=order)
    sampler = sampler_of(loader)
    samples, drop_last = len(sampler), bool(unwrapped(loader.batch_sampler).drop_last)
    if not samples:
        raise Refused("the training set has no samples")
    if drop_last and samples < share.plan.global_batch:
        raise Refused(
            f"the training set has {samples} samples and its loader drops the last batch, so no batch of "
            f"global_batch_size={share.plan.global_batch} remains; use global_batch_size={samples} or fewer"
        )
    order = TrainingSlices(share, sampler, samples, drop_last, combined, loader.dataset)
    return sliced(loader, read, pins_for_gpu, batch_sampler=order)


def evaluation_loader(loader: DataLoader[Any], share: RankShare, pins_for_gpu: bool = False) -> DataLoader[Any]:
    """Return a copy of a DataLoader that reads this rank's share of the samples, each once over all ranks.

    A batch is at most as large as the loader's batch size and a micro-batch, or as a batch sampler forms it. The
    arguments are those of `training_loader`.

    Raises:
        Refused: there are no samples, or fewer than ranks.
    """
    if is_stream(loader):
        return _of_stream(loader, *stream.evaluated_stream(loader, share), pins_for_gpu)
    batches: Any = EvaluationBatches(loader, share)
    given: Any = loader.batch_sampler
    if given is not unwrapped(given):  # in Lightning's wrapper, which records the predicted indices
        batches = type(given)(batches)
    read = EvaluatedSamples(loader.dataset, share.seed, loader.collate_fn)
    return sliced(loader, read, pins_for_gpu, batch_sampler=batches)


def _of_stream(
    loader: DataLoader[Any],
    slices: stream.StreamSlices | stream.StreamRounds,
    reader: stream.IndexedStream,
    pins_for_gpu: bool,
) -> DataLoader[Any]:
    collate = stream.StreamCollate(loader.collate_fn)
    copied = sliced(loader, reader, pins_for_gpu, collate, stream.StreamLoader, batch_sampler=None, sampler=slices)
    copied.received = stream.StreamReceiver(slices)
    return copied


def sliced(
    loader: DataLoader[Any],
    dataset: Any,
    pins_for_gpu: bool,
    collate_fn: Callable[[Any], Any] | None = None,
    mixin: type[DataLoader[Any]] | None = None,
    **order: Any,
) -> DataLoader[Any]:
    """Return a loader of the same class, with the same attributes, that reads a dataset in another order.

    The class's constructor, which may take other arguments, is not called. A loader loses its state dict: Lightning
    would resume from it in addition to the run's position.

    Args:
        collate_fn: None for that of the given loader.
        mixin: overrides methods of the class; None for nothing.
        order: the attributes `batch_sampler`, and `sampler` if there is no batch sampler.
    """
    kind = type(loader)
    if mixin is not None or hasattr(kind, "state_dict"):
        without = dict.fromkeys(
            ("state_dict", "load_state_dict")
        )  # None marks a method that a class does not implement
        kind = type(kind.__name__, (kind,) if mixin is None else (mixin, kind), without)
    copied = kind.__new__(kind)
    changed = {
        "dataset": dataset,
        "collate_fn": collate_fn or loader.collate_fn,
        "pin_memory": loader.pin_memory or (pins_for_gpu and loader.num_workers > 0),
        "sampler": order.get("batch_sampler"),  # for Lightning, which tells it the epoch, and for what users read
        "in_order": True,
        "makes_batches": takes_one(loader),
        "_dataset_kind": 0,  # map-style, by index
        "_iterator": None,
        "_DataLoader__multiprocessing_context": loader.multiprocessing_context,
        **order,
    }
    vars(copied).update({**vars(loader), **changed})  # past a setter that refuses changes
    return copied


def _slices(loader: Any) -> Any:
    """Return what gives a loader its order: of a copy, the engine's."""
    sampler = getattr(loader, "batch_sampler", None)
    return getattr(loader, "sampler", None) if sampler is None else unwrapped(sampler)


def samples_in(loader: Any, batch_idx: int) -> int | None:
    """Return the number of samples in a batch of an evaluation's loader; None if only the loader knows it."""
    slices = _slices(loader)
    is_known = isinstance(slices, EvaluationBatches) and not loader.makes_batches
    return slices.samples_in(batch_idx) if is_known else None


def takes_one(loader: DataLoader[Any]) -> bool:
    """Return whether a collate function returns the first of several samples, as for a dataset that makes batches."""
    samples = [object(), object()]
    try:
        return bool(loader.collate_fn(samples) is samples[0]) and not reads_batches(loader.dataset)
    except Exception:  # whatever it raises for objects that are no samples
        return False


def obstacle(loader: object) -> str | None:
    """Return why a loader can't be copied, as text for the user; None if it can."""
    if not isinstance(loader, DataLoader):
        return f"it is a {type(loader).__name__}, not a torch DataLoader"
    if type(loader).__len__ is not DataLoader.__len__:
        return f"its class, {type(loader).__name__}, has a __len__ of its own"
    if is_stream(loader) and type(loader).__iter__ is not DataLoader.__iter__:  # which would get positions with batches
        return f"its class, {type(loader).__name__}, has an __iter__ of its own"
    if loader.batch_sampler is None:
        return "it has batch_size=None, so its dataset makes the batches"
    if is_stream(loader):
        return None
    order = unwrapped(loader.batch_sampler)
    kind, order = ("batch sampler", order) if forms_batches(loader) else ("sampler", order.sampler)
    return None if sized_len(order) is not None else f"its {kind}, {type(order).__name__}, has no len()"


def is_stream(loader: DataLoader[Any]) -> bool:
    """Return whether the dataset alone determines the order of a loader's samples."""
    return isinstance(loader.dataset, IterableDataset)


class Combined:
    """Training loaders of a run, which make a batch together, and the number of steps of an epoch over all of them.

    Args:
        mode: returns the mode of Lightning's CombinedLoader; called only once there is one.
    """

    def __init__(self, mode: Callable[[], str] = lambda: CYCLE) -> None:
        self.mode = mode
        self.slices: list[Any] = []  # of copied loaders: TrainingSlices
        self.others: list[Any] = []  # loaders that run unchanged, and only count toward the length of an epoch

    def add(self, slices: TrainingSlices) -> int:
        """Add the batch sampler of a copied loader; return its index, which is part of the loader's seeds."""
        self.slices.append(slices)
        return len(self.slices) + len(self.others) - 1

    @property
    def is_single(self) -> bool:
        """Whether the run has a single training loader."""
        return len(self.slices) + len(self.others) == 1

    @property
    def is_sized(self) -> bool:
        """Whether the number of steps of an epoch is known before it ends."""
        return all(slices.is_sized for slices in self.slices)

    @property
    def is_formed(self) -> bool:
        """Whether the loaders make the sizes of batches, in place of the plan."""
        return all(slices.is_formed for slices in self.slices)

    def steps_of(self, own_steps: int) -> int:
        """Return the number of optimizer steps that a loader makes in an epoch.

        In the mode max_size_cycle, the sampler of a shorter loader repeats its samples. Lightning would restart the
        loader instead, which after a resume would begin with other samples.

        Args:
            own_steps: number of steps for which the loader's samples suffice once.
        """
        if self.is_single or self.mode() != CYCLE or not self.slices:
            return own_steps
        accumulation = self.slices[0].plan.accumulation
        others = (-(-(sized_len(loader) or 0) // accumulation) for loader in self.others)
        return int(max(*(slices.own_steps for slices in self.slices), *others, own_steps))

    @property
    def longest(self) -> Any:
        """Slices of the loader that determines the length of an epoch."""
        shortest = self.mode() == "min_size" and not self.is_single
        return (min if shortest else max)(self.slices, key=lambda slices: slices.own_steps)

    @property
    def digest(self) -> int:
        """Digest of the samples that the loaders now begin with: equal on ranks that draw the same."""
        return mix(*(slices.digest for slices in self.slices))

    @property
    def samples(self) -> int:
        """Total samples of the loaders of known length (0 if none), by which a resumed run detects changed data."""
        return sum(slices.samples for slices in self.slices if slices.is_sized)

    def check(self) -> None:
        """Check that a run with these loaders is the same at any world size.

        Raises:
            Refused: it is unknown which loader ends last, or a batch of several loaders does not divide evenly.
        """
        if self.is_single:
            return
        if not self.is_sized and self.mode() == CYCLE:
            raise Refused(
                "a training stream, one of several loaders, has no len(), so it is unknown which loader ends last; "
                "give its dataset a __len__, or use a CombinedLoader with mode=min_size or max_size"
            )
        for slices in self.slices:
            if not slices.is_even:
                plan = slices.plan
                raise Refused(
                    "one of several training loaders has a step which does not divide over "
                    f"{plan.replicas} devices × accumulation {plan.accumulation}; use global_batch_size="
                    f"{plan.micro_batch * plan.slices}, drop_last=True in that loader, and no batch sampler of its own"
                )


def data_rank(trainer: Trainer) -> int:
    """Return this process's data-parallel rank.

    Ranks that hold one layer together (tensor parallelism) have the same one: they read the same samples and drop the
    same units in dropout.
    """
    return int((trainer.distributed_sampler_kwargs or {}).get("rank", 0))


def _pins(trainer: Trainer) -> bool:
    return trainer.strategy.root_device.type == "cuda"


def _compare(digest: int, of: str, is_formed: bool) -> None:
    """Check that all ranks draw the same samples of a set, given a digest of them. Collective.

    Raises:
        Refused: they draw others.
    """
    if len(set(of_ranks(digest))) > 1:
        split = "type data.sharded_by=dataset" if is_formed else "give it num_replicas=1 and rank=0"
        raise Refused(
            f"the ranks draw different samples of {of} that they should share: let what splits, weights or shuffles it "
            "draw from the global generators of torch, NumPy and Python, or from one with a seed, and follow nothing "
            f"that one rank alone has seen; if its {'batch ' if is_formed else ''}sampler splits them by rank, {split}"
        )


def _set_epoch(loader: object, epoch: int) -> None:
    """Pass the epoch to a loader's dataset if it has `set_epoch`, for example to shuffle by it."""
    set_epoch = getattr(getattr(loader, "dataset", None), "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def _mode(trainer: Trainer) -> str:
    assert trainer.fit_loop._combined_loader is not None
    return trainer.fit_loop._combined_loader._mode


def _say_what_does_not_hold(trainer: Trainer, reason: str, training: bool, splits: bool) -> None:
    is_alone = trainer.world_size == 1
    lost = "it sets its own batch size and order, and a resumed run restarts its epoch; speeds count global_batch_size"
    if training and not is_alone:
        lost += "; all ranks must end at the same batch"
        lost += "" if splits else ", and read the same samples unless the loader splits them"
    elif not training:
        lost = "the samples that each rank evaluates depend on the loader, and may be counted twice"
    if trainer.global_rank == 0 and (training or not is_alone):
        log.warning("this data loader is left unchanged because %s: %s", reason, lost)
