"""Speed and memory, as metrics."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightswitch.monitoring.batch_count import batches, is_logged
from lightswitch.monitoring.memory import peak_bytes
from lightswitch.monitoring.meter import Meter


class Throughput(Callback):
    """Callback that logs, at each logged step, the speed since the last one and the peak memory of rank 0.

    Time in validation and in saving checkpoints does not count; time spent waiting for data does. Memory is in GiB,
    speed in seconds a step, samples and tokens a second.

    Args:
        samples_per_step: the global batch.
        tokens_per_sample: a sample's length in tokens, where samples are sequences.
    """

    def __init__(self, samples_per_step: int, tokens_per_sample: int | None = None) -> None:
        self._samples_per_step = samples_per_step
        self._tokens_per_sample = tokens_per_sample
        self._meter = Meter()

    def count(self, samples_per_step: int) -> None:
        """Take another number of samples a step: that of a data loader whose batches are its own."""
        self._samples_per_step = samples_per_step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meter.start(batches(trainer))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._meter.resume()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._meter.is_warming_up:
            self._meter.update(batches(trainer))
        if not is_logged(trainer) or trainer.fit_loop._should_accumulate():
            return
        metrics = {"memory/peak_gib": peak_bytes(trainer.strategy.root_device) / 2**30}
        if (steps_per_second := self._meter.read(batches(trainer))) is not None:
            metrics |= self._speed(steps_per_second)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meter.pause()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._meter.pause()  # until the next batch starts

    def _speed(self, steps_per_second: float) -> dict[str, float]:
        samples_per_second = steps_per_second * self._samples_per_step
        speed = {
            "throughput/step_seconds": 1 / steps_per_second,
            "throughput/samples_per_second": samples_per_second,
        }
        if self._tokens_per_sample is not None:
            speed["throughput/tokens_per_second"] = samples_per_second * self._tokens_per_sample
        return speed
