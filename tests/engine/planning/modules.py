"""Modules that a plan meets."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics import CatMetric

from tests.engine.foreign import Batch, Classifier


class LooksAtValues(Classifier):
    """Its step depends on what it computes, and counts what it gets right."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.losses = CatMetric()

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.flatten(1))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        loss = cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.losses(loss)
        return loss / 2 if loss.item() > 3 else loss


class WaitsForAValue(LooksAtValues):
    """Its step does not end before a value does what those of a plan do not."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        while loss.item() < 100:
            loss = 2 * loss
        return loss
