"""Small grey images, made of noise, and a classifier as people write them: a transformer over patches."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn.functional import unfold
from torch.utils.data import DataLoader, TensorDataset

from tests.engine.foreign import Classifier
from tests.engine.models.transformer import Blocks, decay_groups

SIDE, CLASSES = 8, 10
PATCH = 2


class PatchClassifier(Classifier):
    """Images (batch, 1, 8, 8) to logits (batch, 10)."""

    def __init__(self, layers: int = 2, heads: int = 2, width: int = 32, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        self.patches = nn.Linear(PATCH**2, width)
        self.positions = nn.Embedding((SIDE // PATCH) ** 2, width)
        self.transformer = Blocks(layers, width, heads, causal=False, dropout=0.0, bias=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(unfold(images, PATCH, stride=PATCH).transpose(1, 2))
        x = x + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.transformer(x).mean(1))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return torch.optim.AdamW(decay_groups(self), self.lr)


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
