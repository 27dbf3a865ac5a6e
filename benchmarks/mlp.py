"""A tiny network on random data, in two modules: in the style of this project, and of lightning-hydra-template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanMetric
from torchmetrics.classification import Accuracy

from project.data.loaders import BatchedData, BatchedDataset, Pair

CLASSES = 10
WIDTH = 32


class Points(BatchedDataset):
    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(samples, WIDTH, generator=generator)
        self.classes = torch.randint(CLASSES, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.classes)

    def __getitems__(self, indices: Sequence[int]) -> Pair:
        chosen = torch.tensor(indices)
        return self.inputs[chosen], self.classes[chosen]


class PointsData(BatchedData):
    def __init__(self, samples: int, batch_size: int = 32) -> None:
        super().__init__(batch_size)
        self.samples = samples

    def load(self) -> dict[str, BatchedDataset]:
        return {"train": Points(self.samples), "val": Points(64), "test": Points(64)}


class MLP(LightningModule):
    """Module that logs its accuracy in the steps at which the Trainer logs; the engine logs the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.correct = torch.tensor(0)  # not a buffer: ddp broadcasts buffers of rank 0 in each forward pass
        self.seen = 0

    def training_step(self, batch: Pair, batch_index: int) -> Tensor:
        inputs, classes = batch
        logits = self.net(inputs)
        self.correct.add_((logits.argmax(1) == classes).sum())  # `+=` would set an attribute of the module
        self.seen += len(classes)
        return F.cross_entropy(logits, classes)

    def on_train_batch_end(self, outputs: Any, batch: Pair, batch_index: int) -> None:
        if self.global_step % self.trainer.log_every_n_steps == 0:
            self.log("train/accuracy", self.correct / self.seen, prog_bar=True)
            self.correct.zero_()
            self.seen = 0

    def configure_optimizers(self) -> Optimizer:
        return optimizer(self)


class PeerMLP(LightningModule):
    """Module with the training_step of lightning-hydra-template's src/models/mnist_module.py."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.train_loss = MeanMetric()
        self.train_acc = Accuracy(task="multiclass", num_classes=CLASSES)

    def training_step(self, batch: Pair, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        preds = torch.argmax(logits, dim=1)
        self.train_loss(loss)
        self.train_acc(preds, y)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Optimizer:
        return optimizer(self)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def optimizer(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)
