"""Modules that write to their weights outside of the optimizer, each as an idiom stands in public code."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.engine.plain import PlainModel

Batch = tuple[Tensor, Tensor, Tensor]


class Distilled(PlainModel):
    """A network and a frozen copy of it, to which the loss keeps it near."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        return nn.functional.cross_entropy(logits, batch[1]) + nn.functional.mse_loss(logits, self.teacher(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.2, momentum=0.9)


def follow_by_data(teacher: nn.Module, student: nn.Module) -> None:
    """As lightly's and MoCo's update of a momentum encoder."""
    for own, other in zip(teacher.parameters(), student.parameters(), strict=True):
        own.data = own.data * 0.7 + other.data * 0.3


@torch.no_grad()
def follow_in_place(teacher: nn.Module, student: nn.Module) -> None:
    """As DINO's and BYOL's."""
    for own, other in zip(teacher.parameters(), student.parameters(), strict=True):
        own.data.mul_(0.7).add_(0.3 * other.detach().data)


class AtBatchEnd(Distilled):
    def on_train_batch_end(self, *_: Any) -> None:
        follow_by_data(self.teacher, self.net)


class AtBatchStart(Distilled):
    def on_train_batch_start(self, *_: Any) -> None:
        follow_in_place(self.teacher, self.net)


class InOptimizerStep(Distilled):
    def optimizer_step(self, *arguments: Any, **named: Any) -> None:
        super().optimizer_step(*arguments, **named)
        follow_in_place(self.teacher, self.net)


class InTrainingStep(Distilled):
    """As in lightly's examples: before the forward pass."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        follow_by_data(self.teacher, self.net)
        return super().training_step(batch, batch_idx)


class Shrinks(pl.Callback):
    """Shrinks the weights in one hook."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._shrink)

    @torch.no_grad()
    def _shrink(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        for parameter in module.parameters():
            parameter.mul_(0.8)


class Idle(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        pass


class Copied(PlainModel):
    """Averages its weights in a copy whose own count as trained, as torch's AveragedModel and timm's ModelEmaV3 do."""

    def __init__(self) -> None:
        super().__init__()
        self.averages = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.7))

    def on_train_batch_end(self, *_: Any) -> None:
        self.averages.update_parameters(self.net)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.2)


class ReadsInEvaluation(PlainModel):
    """Computes with a weight outside of what holds it, in evaluations alone."""

    def _evaluate(self, stage: str, batch: Batch) -> None:
        self.log(f"{stage}/norm", (torch.ones(4, 16) * self.net[3].weight).norm())


class Clamped(PlainModel):
    """Clips weights after each step, as a Wasserstein GAN's critic."""

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.net.parameters():
            parameter.data.clamp_(-0.4, 0.4)


class BoundedEmbedding(PlainModel):
    """Of rows whose norm torch bounds where they are read: those of a sample, so each rank reads others."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(200, 2, max_norm=0.5)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0] + self.rows(batch[2] % 200)), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=2.0, momentum=0.9)


class Normalized(PlainModel):
    """Sets scale and shift from the first batch, as ActNorm of normalizing flows does in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, ActNorm(16))


class ActNorm(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(features)), nn.Parameter(torch.ones(features))
        self.register_buffer("is_set", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set and self.training:
            self.shift.data.copy_(-x.detach().mean(0))
            self.scale.data = 1 / (x.detach().std(0) + 1e-3)
            self.is_set.fill_(1)
        return (x + self.shift) * self.scale


class OnTop(Distilled):
    """Follows within a training step by parameters of the module's own, on either side of a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.slow = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4), requires_grad=False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.slow.data = self.slow.data * 0.7 + self.scale.data * 0.3
        loss = super().training_step(batch, batch_idx)
        loss = loss + ((self.net(batch[0]) * self.scale - self.slow) ** 2).mean()
        self.slow.data.add_(0.01)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.2, momentum=0.9)


class ByHand(PlainModel):
    """Manual optimization: as many backward passes a step as ``passes``, each of a part of the loss."""

    def __init__(self, passes: int = 2) -> None:
        super().__init__()
        self.automatic_optimization, self.passes = False, passes

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for part in range(self.passes):
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.manual_backward(loss * (part + 1))
        optimizer.step()
        return loss


class ClippedByHand(ByHand):
    """A critic: clips weights within the step, after the optimizer's."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for parameter in self.net.parameters():
            parameter.data.clamp_(-0.4, 0.4)
        return loss


class PastTheWrapper(ByHand):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        optimizer = self.optimizers().optimizer
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.manual_backward(loss)
        optimizer.step()
        return loss
