"""The samples that ranks read in the first steps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_leaves

from lightswitch.batches.combined import CYCLE, Combined
from lightswitch.batches.loaders import evaluation_loader, obstacle, training_loader
from lightswitch.batches.order import TrainingSlices
from lightswitch.batches.plan import BatchPlan
from lightswitch.batches.position import Position


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
