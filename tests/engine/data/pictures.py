"""Small grey images, made of noise."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

SIDE, CLASSES = 8, 10


class Pictures(pl.LightningDataModule):
    """Images (1, 8, 8) of noise, brighter in the six pixels that their class names.

    The default is no whole number of batches of 16 or 24, neither in training nor in evaluation.
    """

    def __init__(self, samples: int = 130) -> None:
        super().__init__()
        self.samples = samples

    def train_dataloader(self) -> DataLoader:
        return DataLoader(pictures(self.samples, seed=1), batch_size=8, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(pictures(90, seed=2), batch_size=8)

    test_dataloader = predict_dataloader = val_dataloader


def pictures(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    images, classes = torch.randn(count, SIDE**2, generator=generator), torch.arange(count) % CLASSES
    first = 6 * classes[:, None]
    images.scatter_add_(1, first + torch.arange(6), torch.ones(count, 6))
    return TensorDataset(images.view(count, 1, SIDE, SIDE), classes)
