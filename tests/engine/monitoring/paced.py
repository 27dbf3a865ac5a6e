"""Training whose phases take a known time, because they sleep."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.engine.monitoring.tiny import Regression

DATA, FORWARD, BACKWARD, OPTIMIZER, REST, SAVE = 0.010, 0.020, 0.030, 0.015, 0.005, 0.1  # seconds


class PacedBatches(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(DATA)
        return torch.ones(4), torch.ones(1)


class Paced(Regression):
    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(FORWARD)
        return super().training_step(batch)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        time.sleep(BACKWARD)
        super().backward(loss, *args, **kwargs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: time.sleep(OPTIMIZER))
        return optimizer


class Reporting(pl.Callback):
    """Takes its time after each step, as callbacks do that log."""

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(REST)


class Saving(pl.Callback):
    """Saves after the fourth step, which takes longer than a step."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/fourth.ckpt")

    def on_save_checkpoint(self, *_: Any) -> None:
        time.sleep(SAVE)


class Late(pl.Callback):
    """Rank 1 ends its forward phase late, and the others wait for it in a collective."""

    SECONDS = 0.2

    def on_before_zero_grad(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        if trainer.global_rank == 1:
            time.sleep(self.SECONDS)
