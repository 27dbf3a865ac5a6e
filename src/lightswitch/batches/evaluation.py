"""Samples that a rank reads in an evaluation: its share of the set, each sample once over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DistributedSampler, Sampler, SequentialSampler

from lightswitch import patches
from lightswitch.batches.generators import mix
from lightswitch.batches.order import check_shared, digest, epoch_order, unwrapped
from lightswitch.batches.plan import pieces
from lightswitch.batches.rank_loader import RankLoader

Limited = Callable[[float, int], float]  # see `Limits.of`


def whole(samples: float, batch: int) -> float:
    """Return all samples of a loader."""
    return samples


class EvaluationBatches(Sampler[Any]):
    """Batch sampler of one rank in an evaluation.

    All ranks make the same number of batches, because forward passes of sharded strategies are collective.

    Args:
        order: the samples of all ranks.
        batches: those of this rank.
        batch_size: maximum number of samples in a batch.
        sizes: of the first batches of all ranks, if the loader forms them.
    """

    def __init__(
        self, order: Sequence[Any], batches: list[Sequence[Any]], batch_size: int, sizes: Sequence[int] = ()
    ) -> None:
        self._order, self._batches, self._sizes = order, batches, sizes
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Any]]:
        return map(list, self._batches)

    def samples_in(self, batch_idx: int) -> int:
        """Return the number of samples of a batch."""
        return len(self._batches[batch_idx])

    def digest(self, dataset: Any) -> int:
        """Return a digest, below 2^63, of the batches of all ranks: equal on ranks that draw the same."""
        return mix(digest(self._order, dataset), *self._sizes) >> 1


def shares(
    sampler: Any, samples: int, batch: int, replicas: int, rank: int, seed: int, most: int | None = None
) -> EvaluationBatches:
    """Return the batches of a contiguous share of the samples, each exactly once over all ranks.

    Shares that differ by one sample are split into as many batches, which differ by one sample.

    Args:
        samples: number of samples, over all ranks.
        batch: maximum number of samples in a batch.
        seed: seed of the order, if the sampler draws one.
        most: number of samples to read, from the start of the order; None for all.

    Raises:
        Refused: there are fewer samples than ranks.
    """
    is_in_order = type(sampler) in (SequentialSampler, DistributedSampler)
    order = (range(samples) if is_in_order else epoch_order(sampler, samples, mix(seed, 0), 0))[:most]
    count = rounds(len(order), -(-len(order) // batch), replicas)
    return EvaluationBatches(order, pieces(pieces(order, replicas)[rank], count), batch)


def rounds(samples: int, batches: int, replicas: int) -> int:
    """Return the number of batches that each rank makes of its share of an evaluation set.

    Args:
        batches: number of batches over all ranks, if none had to be cut or joined.

    Raises:
        Refused: there are fewer samples than ranks.
    """
    check_shared(samples, replicas)
    return min(-(-batches // replicas), samples // replicas)


class Limits:
    """Limits of the evaluation that a Trainer runs, or fits with, in batches as the user's loaders make them.

    Lightning counts those of a device, whose sizes depend on the number of devices. Here loaders that are copied end by
    themselves, after the samples of so many of the user's batches; of others each rank reads so many batches.

    Args:
        accumulation: micro-batches of a step, in which Lightning has the limits that count training steps, too.
        on_loaders: called before loaders are requested.
    """

    def __init__(self, trainer: Trainer, accumulation: int, on_loaders: Callable[[], None]) -> None:
        self._trainer, self._accumulation, self._on_loaders = trainer, accumulation, on_loaders
        self._limit: float = 1.0
        predicts = trainer.state.fn == TrainerFn.PREDICTING
        self._loop: Any = trainer.predict_loop if predicts else trainer._evaluation_loop
        self._counts = "max_batches" if predicts else "_max_batches"  # name of the list that is made with the loaders
        patches.replace(self._loop, "setup_data", self._set_up)

    def end(self) -> None:
        """Let Lightning apply its own limits again."""
        patches.restore(self._loop, "setup_data")

    def of(self, samples: float, batch: int) -> float:
        """Return how many of a loader's samples are read.

        Args:
            samples: those that it has; infinity for an unknown number.
            batch: samples of one of its batches.

        Raises:
            MisconfigurationException: a fraction of them is none, or their number is unknown.
        """
        stage, limit = self._trainer.state.stage, self._limit
        assert stage is not None
        return _parse_num_batches(stage, samples, limit * batch if isinstance(limit, int) else limit)

    def _set_up(self) -> None:
        """Set up the loaders of the evaluation, unless there are some already."""
        trainer, before = self._trainer, vars(self._loop)[self._counts]
        name = f"limit_{self._loop._data_source.name.removesuffix('_dataloader')}_batches"
        given = getattr(trainer, name)
        self._limit = self._of_user(name, given)
        self._on_loaders()
        patches.replace(trainer, name, 1.0 if given else given)
        try:
            type(self._loop).setup_data(self._loop)
        finally:
            patches.replace(trainer, name, given)
        if (counts := vars(self._loop)[self._counts]) is not before:
            for at, loader in enumerate(self._loop._combined_loader.flattened):
                counts[at] = counts[at] if isinstance(loader, RankLoader) else self.of(counts[at], 1)

    def _of_user(self, name: str, limit: float) -> float:
        """Return a limit as it was typed: Lightning has those that count training steps, too, in micro-batches."""
        trainer: Any = self._trainer  # sets these past their declaration
        of_steps = trainer.fast_dev_run or (trainer.overfit_batches and name == "limit_val_batches")
        return limit // self._accumulation if of_steps and isinstance(limit, int) else limit


def samples_in(loaders: Any, dataloader_idx: int, batch_idx: int) -> int | None:
    """Return the number of samples in a batch of one of an evaluation's loaders; None if only the loader knows it."""
    loader = loaders.flattened[dataloader_idx]
    if not isinstance(loader, RankLoader) or loader.makes_batches:
        return None
    slices: Any = loader.sampler if loader.batch_sampler is None else unwrapped(loader.batch_sampler)
    return int(slices.samples_in(batch_idx))
