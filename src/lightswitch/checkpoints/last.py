"""The checkpoint that a run goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint


class LastCheckpoint(Checkpoint):
    """Writes ``folder``/last.ckpt every so many optimizer steps and at the end of training.

    Lightning's `save_last` follows the last *best* one, and nothing of it is written at the end of a run whose length
    is no multiple of its interval.
    """

    def __init__(self, folder: str, every_n_steps: int) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps is {every_n_steps}; it counts optimizer steps, so it is at least 1")
        self.path = Path(folder) / "last.ckpt"
        self.every_n_steps = every_n_steps
        self._saved_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step // self.every_n_steps > self._saved_step // self.every_n_steps:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step != self._saved_step:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        self._saved_step = trainer.global_step
        if not getattr(trainer, "fast_dev_run", False):  # set past Lightning's own declaration
            trainer.save_checkpoint(self.path)
