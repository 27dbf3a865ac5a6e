"""Modules that break a promise, each for one of the ten causes, as it stands in public code; and one that keeps all."""

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


class OverItems(Good):
    """Means over what is no sample, as over the tokens that are not padding."""

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        counts = (y + 1).float()
        return (cross_entropy(logits, y, reduction="none") * counts).sum() / counts.sum()


class Dice(Good):
    """Divides sums over the batch (V-Net, Milletari et al. 2016)."""

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        found, target = logits.softmax(1), nn.functional.one_hot(y, 4).float()
        return 1 - (2 * (found * target).sum(0) / (found + target).sum(0)).mean()


class Noisy(Good):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, nn.Dropout(0.5))


class MovedInForward(Good):
    """Sets weights from the first batch, as codebooks and ActNorm are."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(2))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.scale.detach().eq(0).all():
            self.scale.data.copy_(1 / batch[0].std(0))
        return self.loss(self.net(batch[0] * self.scale), batch[1])


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


class PastLightning(Good):
    """Moves its weights by itself, past the optimizer that Lightning sees."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.sub_(0.05 * parameter.grad)
                parameter.grad = None
        return loss


class ReadsDice(Dice):
    """Computes with a weight outside of the forward pass of what holds it, which a sharded one can't be, from its
    fifth step on: what fails in the first ones is refused."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.global_step < 4:
            return super().training_step(batch, batch_idx)
        penalty = (torch.ones(4, 16) * self.net[2].weight).pow(2).sum()
        return super().training_step(batch, batch_idx) + 0.01 * penalty


class OfGPUs(Good):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch[0].cuda()), batch[1].cuda())


class Raises(Good):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        raise ValueError("the step of the user's own")
