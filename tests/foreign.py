"""LightningModules as other projects have them, for strategies to train as they are."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

Batch = tuple[Tensor, Tensor]


class Pictures(pl.LightningDataModule):
    """Noise of 8 × 8, brighter in the half that the class names."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(pictures(120, seed=1), batch_size=8, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(pictures(40, seed=2), batch_size=8)

    test_dataloader = predict_dataloader = val_dataloader


def pictures(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    images, classes = torch.randn(count, 1, 8, 8, generator=generator), torch.arange(count) % 2
    images[classes == 0, :, :4] += 1
    images[classes == 1, :, 4:] += 1
    return TensorDataset(images, classes)


class Classifier(pl.LightningModule):
    """`training_step` calls the layers itself, one by one, as there is no `forward`."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.accuracy = MulticlassAccuracy(2)

    def logits(self, images: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.logits(batch[0]), batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluate("test", batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.logits(batch[0]).argmax(-1)

    def evaluate(self, stage: str, batch: Batch) -> None:
        logits = self.logits(batch[0])
        self.accuracy(logits, batch[1])
        self.log(f"{stage}/accuracy", self.accuracy)
        self.log(f"{stage}/loss", nn.functional.cross_entropy(logits, batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Groups by dimensions, as nanoGPT does."""
        matrices = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in self.parameters() if parameter.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.hparams.lr)


class Convolutions(Classifier):
    """Convolutions, batch norm, and a free parameter that is a scalar."""

    def __init__(self) -> None:
        super().__init__()
        stages = [(1, 8), (8, 8), (8, 8)]
        self.stages = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in stages]
        )
        self.head = nn.Linear(8 * 64, 2)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def logits(self, images: Tensor) -> Tensor:
        x = images
        for stage in self.stages:
            x = stage(x)
        return self.head(x.flatten(1)) * self.temperature


class Encoder(Classifier):
    """torch's own transformer, over the rows of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 2)

    def logits(self, images: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(images.squeeze(1))).mean(1))
