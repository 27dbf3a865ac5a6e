"""An image classifier as people write them: a transformer over patches, built in the constructor."""

from __future__ import annotations

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn.functional import unfold

from tests.engine.data.pictures import CLASSES, SIDE
from tests.engine.foreign import Classifier
from tests.engine.models.transformer import Blocks, decay_groups

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
