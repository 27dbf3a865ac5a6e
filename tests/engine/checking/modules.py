"""Modules that break a promise, as they stand in public code; and one that keeps all."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Batch = tuple[Tensor, Tensor, Tensor]


class Good(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 4))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch[0]), batch[1])

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(logits, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class LogsTheLargest(Good):
    """Logs by step what is no mean over samples."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        self.log("train/largest", logits.detach().max())
        return self.loss(logits, batch[1])


class Normed(Good):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))


class Dice(Good):
    """Divides sums over the batch (V-Net, Milletari et al. 2016)."""

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        found, target = logits.softmax(1), nn.functional.one_hot(y, 4).float()
        return 1 - (2 * (found * target).sum(0) / (found + target).sum(0)).mean()


class Noisy(Good):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, nn.Dropout(0.5))


class ScaledByRank(Good):
    """Writes into a weight in a hook, from what its own rank has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.zeros(4), requires_grad=False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        self.seen = logits.detach().mean(0)
        return self.loss(logits - self.center, batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.center.lerp_(self.seen, 0.5)


class Queued(Good):
    """Feeds a queue with its own samples (MoCo), which the next steps compare with."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(24, 2))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(self.net(batch[0] + self.queue.mean(0)), batch[1])
        self.queue = torch.cat([batch[0], self.queue])[:24]
        return loss


class Unseeded(Good):
    def __init__(self) -> None:
        super().__init__()
        generator = np.random.default_rng()  # in a closure, where the engine does not look for one to seed
        self.draw = lambda shape: generator.normal(size=shape)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        noise = torch.as_tensor(self.draw(batch[0].shape), dtype=torch.float32)
        return self.loss(self.net(batch[0] + noise), batch[1])


class Replaying(Good):
    """Trains on what it has seen before, kept in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.seen.append(batch[0].mean(0))
        return self.loss(self.net(batch[0] + torch.stack(self.seen).mean(0)), batch[1])


class OfGPUs(Good):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch[0].cuda()), batch[1].cuda())


class Raises(Good):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        raise ValueError("the step of the user's own")
