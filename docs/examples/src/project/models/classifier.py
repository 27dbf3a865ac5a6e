"""Any network from inputs to logits, as a classifier."""

from collections.abc import Callable

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy

Batch = tuple[Tensor, Tensor]  # inputs and the number of each one's class


class Classifier(LightningModule):
    def __init__(
        self, network: Callable[[], nn.Module], classes: int, optimizer: Callable[..., torch.optim.Optimizer]
    ) -> None:
        super().__init__()
        self.network, self.optimizer = network, optimizer
        self.accuracy = MulticlassAccuracy(classes, average="micro")

    def configure_model(self) -> None:  # built once, and sharded from here, where the strategy shards
        if not hasattr(self, "net"):
            self.net = self.network()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, labels = batch
        return cross_entropy(self.net(inputs), labels)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: Batch) -> None:
        inputs, labels = batch
        logits = self.net(inputs)
        self.accuracy(logits, labels)
        self.log(f"{stage}/loss", cross_entropy(logits, labels))
        self.log(f"{stage}/accuracy", self.accuracy, on_epoch=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())
