"""A run small enough to test with: a linear regression, and what the engine logs of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.engine.fits import local_trainer

BATCH = 8


class Regression(LightningModule):
    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self._fused = fused

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("val/loss", self._loss(batch), sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("test/loss", self._loss(batch), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=self._fused)


class Engine(Callback):
    """Logs `train/loss` and `samples` when and how the engine does."""

    def __init__(self, global_batch: int = BATCH) -> None:
        self._global_batch = global_batch

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, *_: Any) -> None:
        if trainer._logger_connector.should_update_logs and not trainer.fit_loop._should_accumulate():
            assert isinstance(outputs, dict)
            pl_module.log("train/loss", outputs["loss"], prog_bar=True)
            self._log_samples(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._log_samples(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_samples(trainer)

    def _log_samples(self, trainer: Trainer) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({"samples": trainer.global_step * self._global_batch}, step=trainer.global_step - 1)


def loader(samples: int = 80, batch: int = BATCH) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 4, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=batch)


def trainer(directory: Path, *, callbacks: Sequence[Callback] = (), **options: Any) -> Trainer:
    has_bar = any(isinstance(one, ProgressBar) for one in callbacks)
    few = {"log_every_n_steps": 5, "max_steps": 20, "num_sanity_val_steps": 0, "enable_progress_bar": has_bar}
    return local_trainer(directory, *callbacks, **{**few, **options})
