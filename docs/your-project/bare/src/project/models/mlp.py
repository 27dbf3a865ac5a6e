"""A classifier of vectors."""

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy

from project.optimizer import OptimizerFactory, SchedulerFactory, configured

Batch = tuple[Tensor, Tensor]  # (batch, inputs) and classes (batch,)


class MLP(LightningModule):
    def __init__(
        self,
        inputs: int,
        classes: int,
        width: int,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
        )
        self.accuracy = MulticlassAccuracy(classes, average="micro")
        self.optimizer, self.scheduler = optimizer, scheduler

    def forward(self, x: Tensor) -> Tensor:
        """Vectors (batch, inputs) to logits (batch, classes)."""
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        x, labels = batch
        return cross_entropy(self(x), labels)  # train/loss is logged by the engine

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        self.evaluate("val", batch)

    def test_step(self, batch: Batch, batch_index: int) -> None:
        self.evaluate("test", batch)

    def predict_step(self, batch: Batch, batch_index: int) -> Tensor:
        """The likeliest class of each: (batch,)."""
        likeliest: Tensor = self(batch[0]).argmax(-1)
        return likeliest

    def evaluate(self, stage: str, batch: Batch) -> None:
        x, labels = batch
        logits = self(x)
        self.accuracy(logits, labels)
        self.log(f"{stage}/loss", cross_entropy(logits, labels))
        self.log(f"{stage}/accuracy", self.accuracy, on_epoch=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return configured(self, self.optimizer, self.scheduler)
