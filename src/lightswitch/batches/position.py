"""Position of a run in its data while it trains, counted in micro-batches."""

from __future__ import annotations

from dataclasses import replace

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage

from lightswitch.batches.loaders import SharedLoaders
from lightswitch.batches.plan import BatchPlan, Position
from lightswitch.errors import listed


class PositionCounter:
    """Counter of finished micro-batches, which determines the run's position in any hook.

    Args:
        start: position at which the run starts.
    """

    def __init__(self, plan: BatchPlan, loaders: SharedLoaders, start: Position) -> None:
        self._plan = plan
        self._loaders = loaders
        self.epoch_start = start
        self.micro_batches = 0  # finished in this epoch

    def start_at(self, at: Position) -> None:
        """Start counting at a position."""
        self.epoch_start = replace(
            at,
            step=0,
            lacks_ending=False,
            global_step=at.global_step - at.step,
            samples=at.samples - self._samples(at.step, at.epoch),
        )
        self.micro_batches = at.step * self._plan.accumulation

    def start_epoch(self, trainer: Trainer) -> None:
        """Start counting the micro-batches of the Trainer's epoch."""
        self.epoch_start = replace(self.position(trainer), epoch=trainer.current_epoch, step=0)
        self.micro_batches = 0

    def finish_batch(self) -> None:
        """Count a micro-batch."""
        self.micro_batches += 1

    def position(self, trainer: Trainer) -> Position:
        """Return the position after the last optimizer step."""
        start, step = self.epoch_start, self._steps(trainer)
        has_ended = step > 0 and self.is_at_epoch_end(trainer) and _epochs(trainer) > start.epoch
        return replace(
            start,
            epoch=start.epoch + has_ended,
            step=0 if has_ended else step,
            global_step=start.global_step + step,
            samples=start.samples + self._samples(step, start.epoch),
            dataset=self._loaders.training.samples or None,
            optimizer_steps=trainer.global_step,
        )

    def _samples(self, steps: int, epoch: int) -> int:
        """Return the number of samples in an epoch's first steps."""
        training = self._loaders.training
        return training.samples_before(steps, epoch) if training.slices else steps * self._plan.global_batch

    def _steps(self, trainer: Trainer) -> int:
        """Return the number of global batches of this epoch that have updated the weights."""
        steps, left = divmod(self.micro_batches, self._plan.accumulation)
        return steps + (left > 0 and self.is_at_epoch_end(trainer))  # an epoch's last step may have fewer

    def is_at_step_end(self, trainer: Trainer) -> bool:
        """Return whether the finished micro-batches form whole optimizer steps."""
        return self.micro_batches % self._plan.accumulation == 0 or self.is_at_epoch_end(trainer)

    def is_at_epoch_end(self, trainer: Trainer) -> bool:
        """Return whether all micro-batches of the epoch are finished."""
        progress = trainer.fit_loop.epoch_loop.batch_progress
        # the last batch of a stream is known only once it is fetched
        is_last = progress.is_last_batch and self.micro_batches >= progress.current.ready
        return is_last or self.micro_batches >= trainer.num_training_batches

    def describe(self, trainer: Trainer, most_samples: int | None = None) -> str:
        """Return a description of this rank's batch: stage, epoch, step, micro-batch, and the indices of its samples.

        Args:
            most_samples: maximum number of listed samples; None for all.
        """
        stage = trainer.state.stage or trainer.state.fn
        message = f"in {stage.value if stage else None}, epoch {trainer.current_epoch}, step {trainer.global_step}"
        if trainer.state.stage != RunningStage.TRAINING:
            return message
        step, micro = divmod(self.micro_batches, self._plan.accumulation)
        parts = [slices.samples_of(step, micro) for slices in self._loaders.training.slices if step < slices.steps]
        samples = [str(sample) for part in parts for sample in part]
        shown = len(samples) if most_samples is None else most_samples
        return f"{message}, micro batch {micro}: samples {listed(samples, shown=shown)}" if samples else message


def _epochs(trainer: Trainer) -> int:
    """Return the number of epochs whose end has begun."""
    processed: int = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]  # set past its type
    return processed
