"""Models that break a promise, each in its way."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from tests.engine.plain import PlainModel

Batch = tuple[Tensor, Tensor, Tensor]


class BatchNormed(PlainModel):
    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.net = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, 4))


class Random(PlainModel):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * random.uniform(0.5, 1.5)


class Counting(PlainModel):
    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.seen = torch.zeros(())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.seen = self.seen + 1
        return super().training_step(batch, batch_idx) / self.seen


class WrittenByShares(PlainModel):
    """Writes into a weight in a hook, from what its own device has seen."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.center = nn.Parameter(torch.zeros(2), requires_grad=False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.seen = batch[0].mean(0)
        return super().training_step((batch[0] - self.center, *batch[1:]), batch_idx)

    def on_train_batch_end(self, *_: object) -> None:
        with torch.no_grad():
            self.center.lerp_(self.seen, 0.5)
