"""The position of a run in its data, and Lightning's loop counters for that position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import NoneType
from typing import Any

KEY = "position"  # of a checkpoint
STREAMS = "streams"  # of a checkpoint: what `state_at` returns, of each training loader in turn
_LOGGED_STEPS = "_batches_that_stepped"  # of a checkpoint of Lightning's loop over batches


@dataclass(frozen=True)
class Position:
    """A point between two optimizer steps. World size and accumulation are no part of it.

    After an epoch's last step it belongs to that epoch until its end begins, and then to the next one.
    """

    epoch: int = 0
    step: int = 0  # global batches taken in this epoch
    global_step: int = 0  # global batches taken in all
    samples: int = 0  # consumed in all
    seed: int = 0
    global_batch: int = 0
    dataset: int | None = None  # samples in the training set; None where its loader runs as it is
    validation_due: bool = False  # the step's validation had not run yet
    epoch_end_due: bool = False  # all steps of the epoch are taken, and no `on_train_epoch_end` had run yet
    optimizer_steps: int | None = None  # taken in all, as the Trainer counts them; None where a batch is a step

    @property
    def epochs(self) -> int:
        """Epochs whose steps are all taken."""
        return self.epoch + self.epoch_end_due

    @property
    def next_batch(self) -> Position:
        """The position from which the next batch is read: the next epoch's, where only the end of one is due."""
        return replace(self, epoch=self.epochs, step=0, epoch_end_due=False) if self.epoch_end_due else self

    @property
    def steps(self) -> int:
        """Optimizer steps taken in all."""
        return self.global_step if self.optimizer_steps is None else self.optimizer_steps

    def other_dataset(self, samples: int) -> str | None:
        """Return why a run with so many training samples can't go on from here; None if it can."""
        if self.dataset in (None, samples):
            return None
        return f"it was trained on {self.dataset} samples, and the training set has {samples} now"

    def difference(self, seed: int, global_batch: int) -> str | None:
        """Return why a run with this seed and global batch can't go on from here, in a line; None if it can."""
        if self.global_batch != global_batch:
            return f"it was trained with global_batch_size={self.global_batch}, this run has {global_batch}"
        if self.seed != seed:
            return f"it was trained with seed={self.seed}, this run has {seed}"
        return None


_KINDS: dict[str, Any] = {
    **{field.name: type(field.default) for field in fields(Position)},  # of numbers and switches
    **dict.fromkeys(("dataset", "optimizer_steps"), (int, NoneType)),
}


def saved_position(checkpoint: Mapping[str, Any]) -> Position | None:
    """Return the position that a checkpoint holds; None for a checkpoint that was not written by this engine.

    Raises:
        ValueError: what it holds is not a position.
    """
    if KEY not in checkpoint:
        return None
    counts = checkpoint[KEY]
    if not isinstance(counts, dict) or not all(
        name in _KINDS and isinstance(count, _KINDS[name]) and 0 <= (count or 0) < 1 << 62
        for name, count in counts.items()
    ):
        raise ValueError(f"its {KEY} is damaged")
    return Position(**counts)


def save_position(checkpoint: dict[str, Any], position: Position) -> None:
    """Put a position into a checkpoint, in plain types."""
    checkpoint[KEY] = asdict(position)


def set_logged_steps(epoch_loop: Any, steps: int) -> int:
    """Let loggers be told another number of steps, as Lightning's loop over batches takes it from a checkpoint.

    Returns:
        The number before.
    """
    state = epoch_loop.on_save_checkpoint()
    before: int = state[_LOGGED_STEPS]
    epoch_loop.on_load_checkpoint({**state, _LOGGED_STEPS: steps})
    return before


def rewrite_loops(fit_loop: dict[str, Any], position: Position, accumulation: int, logged_steps: int) -> None:
    """Set the counters of Lightning's fit loop, in a checkpoint that is being read, to those of a position.

    Lightning saves its counters as they are in whatever hook the checkpoint was written, counts micro batches, and
    resumes rightly from few of these states. So one canonical state replaces them: in an epoch, that of a checkpoint
    written in `on_train_batch_end`; between epochs, that of an epoch about to start; and in between, that of one whose
    last batch is over, from which `EpochLoop` goes on.

    Args:
        fit_loop: the checkpoint's state of the loop, changed in place.
        accumulation: micro batches of a global batch in this run.
        logged_steps: that loggers were told of.
    """
    epoch, taken = position.epoch, position.step * accumulation
    total = position.global_step * accumulation
    started = epoch + 1 if taken else epoch
    is_within_epoch = bool(taken) and not position.epoch_end_due
    epochs = {"ready": started, "completed": epoch, "started": started, "processed": epoch}
    fit_loop["epoch_progress"] = {"total": dict(epochs), "current": dict(epochs)}
    fit_loop["epoch_loop.batch_progress"] = {
        "total": _batches(total, ended=not is_within_epoch),
        "current": _batches(taken, ended=not is_within_epoch),
        "is_last_batch": position.epoch_end_due,
    }
    fit_loop["epoch_loop.val_loop.batch_progress"] = {
        "total": _batches(0, ended=True),
        "current": _batches(0, ended=True),
        "is_last_batch": False,
    }
    # Lightning adds the one itself when it resumes from `on_train_batch_end`
    fit_loop["epoch_loop.state_dict"][_LOGGED_STEPS] = logged_steps - bool(taken)


def _batches(count: int, ended: bool) -> dict[str, int]:
    return {"ready": count, "completed": count if ended else count - 1, "started": count, "processed": count}
