"""What the runs of an earlier commit trained: a plain module with dropout, a buffer and a schedule, on points in blobs.

It stays as it is: the runs beside it name it, and were made with it.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Blobs(pl.LightningDataModule):
    """96 points for training and 24 for evaluation, of 8 numbers each, around 4 centers."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        classes = torch.arange(120) % 4
        points = 2 * torch.eye(8)[classes] + torch.randn(120, 8, generator=generator)
        self.train, self.held_out = TensorDataset(points[:96], classes[:96]), TensorDataset(points[96:], classes[96:])

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, batch_size=8, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.held_out, batch_size=8)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.held_out, batch_size=8)


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def _loss(self, batch: tuple[Tensor, Tensor], name: str) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log(name, loss)
        return loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch, "train/loss")

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._loss(batch, "val/loss")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._loss(batch, "test/loss")

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95), "interval": "step"}]
