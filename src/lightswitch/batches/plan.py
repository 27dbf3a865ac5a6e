"""Split of a global batch into micro-batches, and position of a run in its data, as numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from math import sqrt
from types import NoneType
from typing import Any

from lightswitch.errors import BatchError

# Trainer arguments that Lightning counts in micro-batches. Users count in steps, whatever the accumulation.
_COUNTED_IN_MICRO_BATCHES = ("limit_train_batches", "val_check_interval", "overfit_batches", "fast_dev_run")


@dataclass(frozen=True)
class BatchPlan:
    """Split of an optimizer step's samples into nearly equal slices, one for each micro-batch of each device.

    Attributes:
        global_batch: samples of a step, over all devices.
        micro_batch: samples of the largest slice; if the global batch does not divide evenly, some slices have one
            less.
        replicas: devices that read different samples (the data-parallel world size).
        accumulation: micro-batches of a step, on each device.
    """

    global_batch: int
    micro_batch: int
    replicas: int
    accumulation: int

    @classmethod
    def derive(cls, global_batch: int, micro_batch: int | None, replicas: int) -> BatchPlan:
        """Return the plan for given batch sizes and a number of devices, from which the accumulation follows.

        Args:
            global_batch: samples of an optimizer step, over all devices.
            micro_batch: maximum number of samples that a device processes at once; None for its whole share.
            replicas: devices that read different samples (the data-parallel world size).

        Raises:
            BatchError: a batch size is less than one.
        """
        if global_batch < 1 or (micro_batch is not None and micro_batch < 1):
            raise BatchError(
                f"global_batch_size {global_batch} and micro_batch_size {micro_batch}: both are numbers "
                "of samples, and must be at least 1"
            )
        most = micro_batch or -(-global_batch // replicas)
        accumulation = -(-global_batch // (replicas * most))
        return cls(global_batch, -(-global_batch // (replicas * accumulation)), replicas, accumulation)

    @cached_property
    def slices(self) -> int:
        """Slices of a step, over all devices."""
        return self.replicas * self.accumulation

    @property
    def is_even(self) -> bool:
        """Whether all slices have the same number of samples."""
        return self.global_batch % self.slices == 0

    @property
    def idle_share(self) -> float:
        """Share of a step's time in which devices with a smaller slice wait for those with a larger one."""
        return 1 - self.global_batch / (self.micro_batch * self.slices)

    def trainer_arguments(self, trainer: Mapping[str, object]) -> dict[str, object]:
        """Return the Trainer's arguments that count steps, converted to micro-batches, which Lightning counts.

        Fractions of an epoch keep Lightning's meaning; see `lightswitch.batches.callback`.
        """
        given = {name: trainer.get(name) for name in _COUNTED_IN_MICRO_BATCHES}
        return {
            name: value * self.accumulation
            for name, value in given.items()
            if isinstance(value, int) and (not isinstance(value, bool) or (name == "fast_dev_run" and value))
        }

    def __str__(self) -> str:
        size = f"{self.micro_batch}" if self.is_even else f"{self.micro_batch - 1} or {self.micro_batch}"
        idle = "" if self.is_even else f", {max(1, round(100 * self.idle_share))} % idle"
        of = f"{self.replicas} device{'s' if self.replicas > 1 else ''}"
        return f"{self.global_batch} samples a step = {size} × {of} × accumulation {self.accumulation}{idle}"


@dataclass(frozen=True)
class RankShare:
    """Share of a run's samples that one rank reads.

    Attributes:
        plan: number of samples of a step, and how they are split.
        rank: this process's data-parallel rank, below ``plan.replicas``.
        seed: seed of the sample order and of augmentation.
    """

    plan: BatchPlan
    rank: int
    seed: int

    def slice_of(self, samples: int, micro: int) -> tuple[int, int]:
        """Return the begin and end of this rank's slice of a step's samples, in a micro-batch of the step."""
        slices, index = self.plan.slices, micro * self.plan.replicas + self.rank
        return samples * index // slices, samples * (index + 1) // slices


def pieces(samples: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """Return consecutive pieces of samples whose lengths differ by one at most."""
    bounds = [len(samples) * at // count for at in range(count + 1)]
    return [samples[begin:end] for begin, end in pairwise(bounds)]


def scaled_learning_rate(lr: float, rule: str, global_batch: int, reference_batch: int) -> float:
    """Return the learning rate for a global batch, given the rate that was tuned at a reference batch.

    Args:
        rule: none; linear (Goyal et al. 2017, arXiv:1706.02677); sqrt (Krizhevsky 2014, arXiv:1404.5997).

    Raises:
        ValueError: there is no such rule.
    """
    ratio = global_batch / reference_batch
    factors = {"none": 1.0, "linear": ratio, "sqrt": sqrt(ratio)}
    if rule not in factors:
        raise ValueError(f"lr_scaling.rule is {rule!r}; use one of: {', '.join(factors)}")
    return lr * factors[rule]


KEY = "position"  # checkpoint key
STREAMS = "streams"  # checkpoint key: results of `state_at` of all training loaders, in order
_LOGGED_STEPS = "_batches_that_stepped"  # key in a checkpoint's state of Lightning's epoch loop


@dataclass(frozen=True)
class Position:
    """Point between two optimizer steps, independent of world size and accumulation."""

    epoch: int = 0
    step: int = 0  # global batches taken in this epoch
    global_step: int = 0  # global batches taken in total
    samples: int = 0  # consumed in total
    seed: int = 0
    global_batch: int = 0
    dataset: int | None = None  # samples in the training set; None if its loader runs unchanged
    optimizer_steps: int | None = None  # taken in total, as the Trainer counts them; None if each batch is a step
    splits_by_seed: bool = False  # data are prepared and set up under `seed` itself; before 0.2, under a hash of it

    @property
    def steps(self) -> int:
        """Optimizer steps taken in total."""
        return self.global_step if self.optimizer_steps is None else self.optimizer_steps

    def other_dataset(self, samples: int) -> str | None:
        """Return why a run with this number of training samples can't resume from here; None if it can."""
        if self.dataset in (None, samples):
            return None
        return f"it was trained on {self.dataset} samples, and the training set has {samples} now"

    def difference(self, seed: int, global_batch: int) -> str | None:
        """Return, in one line, why a run with this seed and global batch can't resume from here; None if it can."""
        if self.global_batch != global_batch:
            return f"it was trained with global_batch_size={self.global_batch}, this run has {global_batch}"
        if self.seed != seed:
            return f"it was trained with seed={self.seed}, this run has {seed}"
        return None


_DUE = ("validation_due", "epoch_end_due")  # flags in checkpoints of earlier versions
_KINDS: dict[str, Any] = {
    **dict.fromkeys(_DUE, bool),
    **{field.name: type(field.default) for field in fields(Position)},  # types of numbers and flags
    **dict.fromkeys(("dataset", "optimizer_steps"), (int, NoneType)),
}


def saved_position(checkpoint: Mapping[str, Any]) -> Position | None:
    """Return the position that a checkpoint holds; None if lightswitch did not write the checkpoint.

    Raises:
        ValueError: the stored value is not a position.
    """
    if KEY not in checkpoint:
        return None
    counts = checkpoint[KEY]
    if not isinstance(counts, dict) or not all(
        name in _KINDS and isinstance(count, _KINDS[name]) and 0 <= (count or 0) < 1 << 62
        for name, count in counts.items()
    ):
        raise ValueError(f"its {KEY} is damaged")
    position = Position(**{name: count for name, count in counts.items() if name not in _DUE})
    return replace(position, epoch=position.epoch + 1, step=0) if counts.get("epoch_end_due") else position


def save_position(checkpoint: dict[str, Any], position: Position) -> None:
    """Store a position in a checkpoint, in plain types."""
    checkpoint[KEY] = asdict(position)


def set_logged_steps(epoch_loop: Any, steps: int) -> int:
    """Set the step number that loggers get, by loading a changed state into Lightning's epoch loop.

    Returns:
        The number before.
    """
    state = epoch_loop.on_save_checkpoint()
    before: int = state[_LOGGED_STEPS]
    epoch_loop.on_load_checkpoint({**state, _LOGGED_STEPS: steps})
    return before


def rewrite_loops(fit_loop: dict[str, Any], position: Position, accumulation: int, logged_steps: int) -> None:
    """Set the counters of Lightning's fit loop, in a checkpoint that is being loaded, to those of a position.

    Lightning saves its counters as they are in the hook that writes the checkpoint, counts micro-batches, and resumes
    correctly from only a few of these states. Therefore one canonical state replaces them: within an epoch, that of a
    checkpoint written in `on_train_batch_end`; between epochs, that of an epoch about to start.

    Args:
        fit_loop: the checkpoint's state of the loop, changed in place.
        accumulation: micro-batches of a global batch in this run.
        logged_steps: step number that loggers get.
    """
    epoch, taken = position.epoch, position.step * accumulation
    total = position.global_step * accumulation
    started = epoch + 1 if taken else epoch
    is_within_epoch = bool(taken)
    epochs = {"ready": started, "completed": epoch, "started": started, "processed": epoch}
    fit_loop["epoch_progress"] = {"total": dict(epochs), "current": dict(epochs)}
    fit_loop["epoch_loop.batch_progress"] = {
        "total": _batches(total, ended=not is_within_epoch),
        "current": _batches(taken, ended=not is_within_epoch),
        "is_last_batch": False,
    }
    fit_loop["epoch_loop.val_loop.batch_progress"] = {
        "total": _batches(0, ended=True),
        "current": _batches(0, ended=True),
        "is_last_batch": False,
    }
    # Lightning adds one itself when it resumes from `on_train_batch_end`
    fit_loop["epoch_loop.state_dict"][_LOGGED_STEPS] = logged_steps - bool(taken)


def end_epoch(progress: Any) -> None:
    """Let a run that is resumed at its last step end in the same epoch as when it trained that step.

    Args:
        progress: of the fit loop, over epochs.
    """
    if progress.current.processed < progress.current.started:
        progress.increment_processed()
        progress.increment_completed()


def _batches(count: int, ended: bool) -> dict[str, int]:
    return {"ready": count, "completed": count if ended else count - 1, "started": count, "processed": count}
