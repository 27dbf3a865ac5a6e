"""DataLoaders re-made from outside, whoever wrote them, so that they read this rank's share of the samples."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightswitch.batches.combined import Combined
from lightswitch.batches.order import EvaluationSlices, TrainingSlices
from lightswitch.batches.plan import BatchPlan
from lightswitch.batches.position import Position
from lightswitch.batches.randomness import EvaluatedSamples, SeededSamples
from lightswitch.batches.rank_loader import RankLoader, made_anew
from lightswitch.batches.sampling import sampler_of, samples_of, unwrapped
from lightswitch.errors import Refused

_OF_TORCHDATA = ("torchdata.stateful_dataloader.sampler", "BatchSampler")


def obstacle(loader: object) -> str | None:
    """Return why a loader can't be re-made, for the user to read; None when it can."""
    if not isinstance(loader, DataLoader):
        return f"it is a {type(loader).__name__}, not a torch DataLoader"
    if loader.batch_sampler is None:
        return "it has batch_size=None, so that its dataset makes the batches"
    if is_stream(loader):
        return None
    if not _is_plain(kind := type(unwrapped(loader.batch_sampler))):
        return f"it has a batch sampler of its own, {kind.__name__}"
    return None


def is_stream(loader: DataLoader[Any]) -> bool:
    """Return whether a loader's samples come in an order that is the dataset's alone."""
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
    """Return another DataLoader like a given one that reads this rank's slices of each global batch.

    Args:
        loader: a map-style one, with a plain batch sampler (see `obstacle`).
        rank: this process's among those that read different samples.
        seed: of the order of samples and of their augmentation.
        at: the position to start from.
        combined: the other training loaders of the run; None for a run of one.
        pins_for_gpu: see `lightswitch.batches.rank_loader.RankLoader`.

    Raises:
        Refused: `drop_last` drops everything, or there are no samples.
    """
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
    slices = TrainingSlices(base, samples, drop_last, plan, rank, seed, at.epoch, at.step, combined)
    samples_of_epoch = SeededSamples(loader.dataset, seed)
    return made_anew(RankLoader, loader, samples_of_epoch, pins_for_gpu=pins_for_gpu, batch_sampler=slices)


def evaluation_loader(
    loader: DataLoader[Any], plan: BatchPlan, rank: int, seed: int, pins_for_gpu: bool = False
) -> RankLoader:
    """Return another DataLoader like a given one that reads this rank's share of the samples, each once over all ranks.

    A batch is no larger than the loader's own, nor than a micro batch. The arguments are those of `training_loader`.

    Raises:
        Refused: there are no samples.
    """
    sampler = sampler_of(loader)
    samples = samples_of(sampler, loader.dataset)
    if not samples:
        raise Refused("an evaluation set has no samples; leave its loader out")
    batch = min(unwrapped(loader.batch_sampler).batch_size, plan.micro_batch)
    slices: Any = EvaluationSlices(sampler, samples, batch, plan.replicas, rank, seed)
    assert loader.batch_sampler is not None
    if type(loader.batch_sampler) is not BatchSampler:  # Lightning's wrapper records the indices that are predicted
        wrapper: Any = type(loader.batch_sampler)
        slices = wrapper(slices)
    evaluated = EvaluatedSamples(loader.dataset, seed)
    return made_anew(RankLoader, loader, evaluated, pins_for_gpu=pins_for_gpu, batch_sampler=slices)


def _is_plain(kind: type) -> bool:
    """Return whether a batch sampler cuts what its sampler yields, in order: torch's, or that of torchdata's loader."""
    return kind is BatchSampler or (kind.__module__, kind.__name__) == _OF_TORCHDATA
