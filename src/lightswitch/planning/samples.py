"""The training data of a planned run: micro batches of any size, and the samples that ranks read first."""

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

from lightswitch.batches.combined import CYCLE, Combined
from lightswitch.batches.loaders import evaluation_loader, obstacle, training_loader
from lightswitch.batches.order import TrainingSlices
from lightswitch.batches.plan import BatchPlan, Position
from lightswitch.errors import Refused


@dataclass(frozen=True)
class Samples:
    """The start of the training data.

    Attributes:
        batch: returns a batch of so many samples; the loader's own batch where that can't be cut.
        is_cut: whether batches can be cut to any number of samples.
        owner: of the loaders: the data module, set up, or the module.
        loaders: of training, as Lightning is given them.
    """

    batch: Callable[[int], Any]
    is_cut: bool
    owner: Any
    loaders: Any


def first_samples(
    model: LightningModule, data: LightningDataModule | None, shares_streams: bool = True, prepares_data: bool = True
) -> Samples:
    """Return the first samples of the training data, of the data module or, without one, of the module itself.

    Args:
        shares_streams: streams are cut, too; else a loader's own batch is a micro batch.
        prepares_data: whether to call the data module's `prepare_data`.

    Raises:
        Refused: there is no training data.
    """
    owner = model if data is None else data
    if not is_overridden("train_dataloader", owner):
        raise Refused(
            "a plan takes a batch of the training data, and there are none; type data=NAME, or "
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
    """Return the samples of a batch of a stream that splits itself; None for other loaders."""
    is_stream = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    return loader.batch_size if is_stream else None  # type: ignore[attr-defined]  # a DataLoader's


def _batch(loader: Any, count: int) -> Any:
    """Return a batch of a loader, without its workers: no process is started for a plan."""
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
    """Return so many samples, repeated from the first where there are fewer.

    Raises:
        Refused: there is none.
    """
    found = list(islice(samples, count))
    if not found:
        raise Refused("the training set has no samples")
    return list(islice(cycle(found), count))


@dataclass(frozen=True)
class Reads:
    """Samples that one rank reads of one training loader.

    Attributes:
        why_not: the reason why its samples are not known; then there are no others.
        samples: of an epoch, over all ranks.
        steps: the indices of each micro batch of each step.
    """

    why_not: str | None = None
    samples: int = 0
    steps: tuple[tuple[tuple[Any, ...], ...], ...] = ()


def first_reads(loaders: Any, plan: BatchPlan, rank: int, seed: int, steps: int) -> tuple[Reads, ...]:
    """Return what a rank reads of each training loader in its first steps.

    Args:
        rank: among those that read different samples.

    Raises:
        Refused: the loaders can't be cut for so many devices, or can't be combined.
    """
    mode = loaders._mode if isinstance(loaders, CombinedLoader) else CYCLE
    combined = Combined(lambda: mode)
    start = Position(seed=seed, global_batch=plan.global_batch)
    found: list[Reads | TrainingSlices] = []
    for loader in _each(loaders):
        if (reason := obstacle(loader)) is not None:
            combined.add_other(loader)
            found.append(Reads(reason))
            continue
        slices = training_loader(loader, plan, rank, seed, start, combined).batch_sampler
        found.append(slices if isinstance(slices, TrainingSlices) else Reads("its samples have no numbers"))
    combined.check()
    return tuple(one if isinstance(one, Reads) else _read(one, plan, steps) for one in found)


def check_evaluation(loaders: Any, plan: BatchPlan) -> None:
    """Check that evaluation can be shared by all devices.

    Raises:
        Refused: there are fewer samples than devices.
    """
    for loader in _each(loaders):
        if obstacle(loader) is None:
            evaluation_loader(loader, plan, rank=0, seed=0)


def _each(loaders: Any) -> list[Any]:
    return tree_leaves(loaders.iterables if isinstance(loaders, CombinedLoader) else loaders)


def _read(slices: TrainingSlices, plan: BatchPlan, steps: int) -> Reads:
    indices = [tuple(chosen) for _, chosen in islice(slices, steps * plan.accumulation)]
    return Reads(None, slices.epoch_samples, _by_step(indices, plan.accumulation))


def _by_step(micro_batches: Sequence[tuple[Any, ...]], accumulation: int) -> tuple[tuple[tuple[Any, ...], ...], ...]:
    return tuple(tuple(micro_batches[at : at + accumulation]) for at in range(0, len(micro_batches), accumulation))
