"""Modules that a plan meets."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.engine.foreign import Batch, Classifier


class LooksAtValues(Classifier):
    """Its step depends on what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.flatten(1))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = cross_entropy(self(batch[0]), batch[1])
        return loss / 2 if loss.item() > 3 else loss
