"""LightningModules as people write them elsewhere, for strategies to train as they are.

Over images (batch, 1, 8, 8) of up to 10 classes: those of tests/engine/data/pictures.py.
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics import CatMetric
from torchmetrics.classification import MulticlassAccuracy

Batch = tuple[Tensor, Tensor]


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(10)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluate("test", batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(-1)

    def evaluate(self, stage: str, batch: Batch) -> None:
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log(f"{stage}/accuracy", self.accuracy)
        self.log(f"{stage}/loss", cross_entropy(logits, batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Groups by dimensions, as nanoGPT does."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        matrices = {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1}
        others = {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0}
        return torch.optim.AdamW([group for group in (matrices, others) if group["params"]], lr=0.01)


class Convolutions(Classifier):
    """Convolutions, batch norms and linear layers, without a block that is repeated."""

    def __init__(self) -> None:
        super().__init__()
        # a bias before a batch norm has no gradient but rounding errors, which Adam makes steps of
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, bias=False)
        )
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.features(images)).relu().flatten(1))


class Encoder(Classifier):
    """torch's own transformer; its parts are called one by one, and not by way of `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(8, 32)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True), 2)
        self.head = nn.Linear(32, 10)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return cross_entropy(self.head(self.encoder(self.rows(batch[0].squeeze(1))).mean(1)), batch[1])

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.encoder(self.rows(images.squeeze(1))).mean(1))


class Late(Classifier):
    """Built in `configure_model`, of everything that a module can be made of."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(8, 16)
        self.late: nn.ModuleList | None = None

    def configure_model(self) -> None:
        if self.late is not None:
            return
        self.late = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(3))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.tied_again = nn.Linear(16, 16)
        self.tied_again.weight = self.tied.weight
        self.free = nn.Parameter(torch.randn(16))
        self.temperature = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("shift", torch.randn(16))
        self.register_buffer("scale", torch.rand(16) + 1, persistent=False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(16, 10)
        self.built_on = self.head.weight.device.type
        self.accuracy = MulticlassAccuracy(10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.early(images.squeeze(1))
        for layer in self.late:
            x = x + layer(x)
        x = self.tied_again(self.tied(self.frozen(x)).tanh()) + self.free
        x = self.norm(x * self.scale + self.shift)
        return self.head(x.mean(1)) * self.temperature


# What can't be trained under every strategy


class OwnSharding(Convolutions):
    """Written for Lightning's ModelParallelStrategy."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.head)


class NothingToShard(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)[:, 20:30] * self.scale


class Lazy(Classifier):
    """Has a layer whose size its first batch tells."""

    def setup(self, stage: str) -> None:
        self.net = nn.Sequential(nn.Flatten(), nn.LazyLinear(10))

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)


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
