"""The count of a run's position in its data, beside the counters of Lightning's loop."""

from __future__ import annotations

from dataclasses import replace

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage

from lightswitch.batches.loaders import SharedLoaders
from lightswitch.batches.plan import BatchPlan
from lightswitch.batches.position import Position
from lightswitch.errors import listed


class PositionCounter:
    """Counter of the micro batches that are finished, which knows the run's position in any hook.

    Args:
        start: where the run starts.
    """

    def __init__(self, plan: BatchPlan, loaders: SharedLoaders, start: Position) -> None:
        self._plan = plan
        self._loaders = loaders
        self._optimizer_steps = 0  # of the Trainer, at the epoch's start
        self._validated_step = 0
        self.epoch_start = start
        self.micro_batches = 0  # finished in this epoch

    def start_at(self, trainer: Trainer, at: Position) -> None:
        """Count from a position."""
        self.epoch_start = replace(
            at,
            step=0,
            global_step=at.global_step - at.step,
            samples=at.samples - self._samples(at.step),
        )
        self._optimizer_steps = trainer.global_step - at.step
        self.micro_batches = at.step * self._plan.accumulation

    def start_epoch(self, trainer: Trainer) -> None:
        """Begin to count the micro batches of the Trainer's epoch."""
        self.epoch_start = replace(self.position(trainer), epoch=trainer.current_epoch, step=0)
        self._optimizer_steps = trainer.global_step
        self.micro_batches = 0

    def finish_batch(self) -> None:
        """Count a micro batch."""
        self.micro_batches += 1

    def finish_validation(self, trainer: Trainer) -> None:
        """Note that the validation of this step has run."""
        self._validated_step = self.position(trainer).global_step

    def position(self, trainer: Trainer) -> Position:
        """Return the position after the last optimizer step."""
        start, step = self.epoch_start, self._steps(trainer)
        is_last = step > 0 and self.is_at_epoch_end(trainer)
        has_ended = is_last and _epochs(trainer) > start.epoch
        return replace(
            start,
            epoch=start.epoch + has_ended,
            step=0 if has_ended else step,
            global_step=start.global_step + step,
            samples=start.samples + self._samples(step),
            dataset=self._loaders.training.samples or None,
            validation_due=False,
            epoch_end_due=is_last and not has_ended,
            optimizer_steps=trainer.global_step,
        )

    def _samples(self, steps: int) -> int:
        """Return the samples of so many steps of the epoch; the last one may have fewer than the others."""
        samples = steps * self._plan.global_batch
        return min(samples, self._loaders.training.epoch_samples) if self._loaders.training.slices else samples

    def _steps(self, trainer: Trainer) -> int:
        """Return the global batches of this epoch that have gone into weights."""
        if not trainer.lightning_module.automatic_optimization:
            return self.micro_batches // self._plan.accumulation
        # also right in a hook that runs between the optimizer's step and the batch's end
        steps = trainer.global_step - self._optimizer_steps
        begun = -(-trainer.fit_loop.epoch_loop.batch_progress.current.ready // self._plan.accumulation)
        return min(steps, begun)

    def is_at_step_end(self, trainer: Trainer) -> bool:
        """Return whether the micro batches that are finished make whole optimizer steps."""
        return self.micro_batches % self._plan.accumulation == 0 or self.is_at_epoch_end(trainer)

    def is_at_epoch_end(self, trainer: Trainer) -> bool:
        """Return whether all micro batches of the epoch are finished."""
        progress = trainer.fit_loop.epoch_loop.batch_progress
        # of a stream, the last one is known once it is fetched
        is_last = progress.is_last_batch and self.micro_batches >= progress.current.ready
        return is_last or self.micro_batches >= trainer.num_training_batches

    def is_validation_due(self, trainer: Trainer) -> bool:
        """Return whether a validation comes after this step, and has not run."""
        fetcher, loop = trainer.fit_loop._data_fetcher, trainer.fit_loop.epoch_loop
        global_step = self.position(trainer).global_step
        if fetcher is None or self._validated_step == global_step:
            return False
        finished = (global_step - self.epoch_start.global_step) * self._plan.accumulation
        if finished < loop.batch_progress.current.ready:  # the next has begun, for which Lightning would answer
            return False
        return loop._should_check_val_fx(fetcher)

    def describe(self, trainer: Trainer, most_samples: int | None = None) -> str:
        """Return which batch this rank is in: stage, epoch, step, micro batch, and the indices of its samples.

        Args:
            most_samples: that are listed; None for all.
        """
        stage = trainer.state.stage or trainer.state.fn
        told = f"in {stage.value if stage else None}, epoch {trainer.current_epoch}, step {trainer.global_step}"
        if trainer.state.stage != RunningStage.TRAINING:
            return told
        step, micro = divmod(self.micro_batches, self._plan.accumulation)
        parts = [slices.samples_of(step, micro) for slices in self._loaders.training.slices if step < slices.steps]
        samples = [str(sample) for part in parts for sample in part]
        shown = len(samples) if most_samples is None else most_samples
        return f"{told}, micro batch {micro}: samples {listed(samples, shown=shown)}" if samples else told


def _epochs(trainer: Trainer) -> int:
    """Return the epochs whose end has begun."""
    processed: int = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]  # set past its type
    return processed
