"""Training data of a planned run: micro-batches of any size, and the first samples that each rank reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset

from lightswitch.batches.loaders import CYCLE, Combined, evaluation_loader, obstacle, training_loader
from lightswitch.batches.order import TrainingSlices
from lightswitch.batches.plan import BatchPlan, Position
from lightswitch.errors import Refused


@dataclass(frozen=True)
class Samples:
    """The start of the training data.

    Attributes:
        batch: returns a batch with the given number of samples, or the loader's own batch if that can't be cut.
        is_cut: whether batches can be cut to any number of samples.
        owner: the object that defines the loaders: the data module, already set up, or the module.
        loaders: the training loaders, as Lightning gets them.
    """

    batch: Callable[[int], Any]
    is_cut: bool
    owner: Any
    loaders: Any


def first_samples(
    model: LightningModule, data: LightningDataModule | None, shares_streams: bool = True, prepares_data: bool = True
) -> Samples:
    """Return the first samples of the training data of the data module or, without one, of the module.

    Args:
        shares_streams: whether to cut the batches of iterable datasets, too; if not, a micro-batch is the loader's
            own batch.
        prepares_data: whether to call the data module's `prepare_data`.

    Raises:
        Refused: there is no training data.
    """
    owner = model if data is None else data
    if not is_overridden("train_dataloader", owner):
        raise Refused(
            "a plan needs a batch of training data, and there is no training data; type data=NAME, or "
            "data._target_=CLASS of a LightningDataModule"
        )
    if data is not None:
        if prepares_data:
            data.prepare_data()
        data.setup("fit")
    given = owner.train_dataloader()
    loaders = given.iterables if isinstance(given, CombinedLoader) else given
    cut: list[bool] = []
    own = {id(loader): None if shares_streams else _own_batch(loader) for loader in tree_leaves(loaders)}
    tree_map(lambda loader: cut.append(_is_cut(loader) and own[id(loader)] is None), loaders)

    def batch(count: int) -> Any:
        return tree_map(lambda loader: _batch(loader, own[id(loader)] or count), loaders)

    return Samples(batch, all(cut), owner, given)


def _is_cut(loader: object) -> bool:
    return isinstance(loader, DataLoader) and loader.batch_sampler is not None


def _own_batch(loader: object) -> int | None:
    """Return the batch size of a loader of an iterable dataset; None for other loaders."""
    is_stream = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    return loader.batch_size if is_stream else None  # type: ignore[attr-defined]  # a DataLoader's


def _batch(loader: Any, count: int) -> Any:
    """Return a batch of a loader without starting its worker processes."""
    if not isinstance(loader, DataLoader):
        return next(iter(loader))
    if isinstance(loader.dataset, IterableDataset):
        stream = iter(loader.dataset)
        return loader.collate_fn(_repeated(stream, count) if _is_cut(loader) else next(stream))
    if not _is_cut(loader):
        return loader.collate_fn(loader.dataset[next(iter(loader.sampler))])
    indices = _repeated((index for batch in loader.batch_sampler or () for index in batch), count)
    many = getattr(loader.dataset, "__getitems__", None)
    return loader.collate_fn(many(indices) if many else [loader.dataset[index] for index in indices])


def _repeated(samples: Iterable[Any], count: int) -> list[Any]:
    """Return ``count`` samples; if there are fewer, repeat them from the first.

    Raises:
        Refused: there are no samples.
    """
    found = list(islice(samples, count))
    if not found:
        raise Refused("the training set has no samples")
    return list(islice(cycle(found), count))


@dataclass(frozen=True)
class Reads:
    """Samples that one rank reads from one training loader.

    Attributes:
        why_not: the reason why the samples are unknown; if set, the other attributes are empty.
        samples: number of samples in an epoch, over all ranks.
        steps: sample indices, by step and micro-batch.
    """

    why_not: str | None = None
    samples: int = 0
    steps: tuple[tuple[tuple[Any, ...], ...], ...] = ()


def first_reads(loaders: Any, plan: BatchPlan, rank: int, seed: int, steps: int) -> tuple[Reads, ...]:
    """Return the samples that a rank reads from each training loader in its first steps.

    Args:
        rank: data-parallel rank.

    Raises:
        Refused: the loaders can't be split over this many devices, or can't be combined.
    """
    mode = loaders._mode if isinstance(loaders, CombinedLoader) else CYCLE
    combined = Combined(lambda: mode)
    start = Position(seed=seed, global_batch=plan.global_batch)
    found: list[Reads | TrainingSlices] = []
    for loader in _each(loaders):
        if (reason := obstacle(loader)) is not None:
            combined.others.append(loader)
            found.append(Reads(reason))
            continue
        slices = training_loader(loader, plan, rank, seed, start, combined).batch_sampler
        found.append(slices if isinstance(slices, TrainingSlices) else Reads("its samples have no indices"))
    combined.check()
    return tuple(one if isinstance(one, Reads) else _read(one, plan, steps) for one in found)


def check_evaluation(loaders: Any, plan: BatchPlan) -> None:
    """Check that each evaluation loader can be split over all devices.

    Raises:
        Refused: a loader has no samples.
    """
    for loader in _each(loaders):
        if obstacle(loader) is None:
            evaluation_loader(loader, plan, rank=0, seed=0)


def _each(loaders: Any) -> list[Any]:
    return tree_leaves(loaders.iterables if isinstance(loaders, CombinedLoader) else loaders)


def _read(slices: TrainingSlices, plan: BatchPlan, steps: int) -> Reads:
    indices = [tuple(chosen) for *_, chosen in islice(slices, steps * plan.accumulation)]
    return Reads(None, slices.epoch_samples, _by_step(indices, plan.accumulation))


def _by_step(micro_batches: Sequence[tuple[Any, ...]], accumulation: int) -> tuple[tuple[tuple[Any, ...], ...], ...]:
    return tuple(tuple(micro_batches[at : at + accumulation]) for at in range(0, len(micro_batches), accumulation))
