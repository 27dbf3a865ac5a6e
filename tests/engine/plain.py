"""A LightningModule and a DataModule as people write them: they know nothing of lightswitch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy


class Points(Dataset):
    """Points in the plane, of the class of their quadrant; each sample carries its index. ``noise`` augments them."""

    def __init__(self, samples: int, offset: int = 0, noise: float = 0.0) -> None:
        self.noise = noise
        generator = torch.Generator().manual_seed(7 + offset)
        self.x = torch.randn(samples, 2, generator=generator)
        self.y = (self.x[:, 0] > 0).long() * 2 + (self.x[:, 1] > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        x = self.x[index] + self.noise * torch.randn(2) if self.noise else self.x[index]
        return x, self.y[index], index


class PlainData(pl.LightningDataModule):
    def __init__(
        self, samples: int = 200, batch_size: int = 64, workers: int = 0, drop_last: bool = False, noise: float = 0.0
    ) -> None:
        super().__init__()
        self.samples, self.batch_size, self.workers, self.drop_last = samples, batch_size, workers, drop_last
        self.noise = noise

    def train_dataloader(self) -> DataLoader:
        return DataLoader(
            Points(self.samples, noise=self.noise),
            self.batch_size,
            shuffle=True,
            num_workers=self.workers,
            drop_last=self.drop_last,
        )

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Points(37, 1), batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(Points(41, 2), batch_size=self.batch_size)

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(Points(41, 2), batch_size=self.batch_size)


class FixedData(PlainData):
    """Has a batch size that no argument tells."""

    def __init__(self) -> None:
        super().__init__(batch_size=24)


class EmptyData(PlainData):
    def __init__(self, shuffle: bool) -> None:
        super().__init__()
        self.shuffle = shuffle

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Points(0), self.batch_size, shuffle=self.shuffle)


class PlainModel(pl.LightningModule):
    """Logs the way tutorials do, without sync_dist. ``halved``: what its learning rate is halved by."""

    def __init__(
        self,
        width: int = 16,
        lr: float = 0.05,
        dropout: float = 0.0,
        eps: float = 1e-8,
        halved: Literal["epoch", "step"] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 4))
        self.accuracy = MulticlassAccuracy(4, average="micro")
        self.mean_loss = MeanMetric()

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch)

    def predict_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).argmax(-1)

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        logits = self.net(batch[0])
        self.accuracy(logits, batch[1])
        self.log(f"{stage}/accuracy", self.accuracy, on_epoch=True)
        self.log(f"{stage}/loss", nn.functional.cross_entropy(logits, batch[1]))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, eps=self.hparams.eps)
        if self.hparams.halved is None:
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1 if self.hparams.halved == "epoch" else 7, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.hparams.halved}}


class AbsentData(PlainData):
    def setup(self, stage: str) -> None:
        raise FileNotFoundError("/data/train.bin is not there")


class UntestedModel(PlainModel):
    test_step = pl.LightningModule.test_step  # as where a module has none


class AveragedModel(PlainModel):
    """Keeps a mean of its weights by hand, as many a diffusion model does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", self.net[0].weight.detach().clone())

    def on_train_batch_end(self, *_: object) -> None:
        self.mean.sub_(0.1 * (self.mean - self.net[0].weight.detach()))


class SGDModel(PlainModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


class NamedModel(PlainModel):
    """Logs losses and accuracy under names of its own, or some of them, or none; not finite if asked."""

    def __init__(
        self,
        loss: str | None = None,
        accuracy: str | None = None,
        nan_from_step: int | None = None,
        trained: str | None = None,
    ) -> None:
        super().__init__()
        self.loss, self.right, self.nan_from_step, self.trained = loss, accuracy, nan_from_step, trained

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trained:
            self.log(self.trained, loss)
        return loss

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        if stage == "test":
            return
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        if self.nan_from_step is not None and self.global_step >= self.nan_from_step:
            loss = loss * torch.nan
        if self.loss:
            self.log(self.loss, loss)
        if self.right:
            self.log(self.right, (logits.argmax(-1) == batch[1]).float().mean())


class NanModel(PlainModel):
    """Whose loss is not a number in one step, or whose gradient alone is not, on one rank."""

    def __init__(self, step: int, rank: int = 0, where: Literal["loss", "gradient"] = "loss") -> None:
        super().__init__()
        self.step, self.rank, self.where = step, rank, where

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if (self.global_step, self.global_rank) == (self.step, self.rank):
            if self.where == "loss":
                return loss * torch.nan
            loss.register_hook(lambda gradient: gradient * torch.nan)
        return loss


class NormedModel(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(2, 16, bias=False)  # before a batch norm, a bias has no gradient but rounding errors
        self.net = nn.Sequential(first, nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))


class CycleModel(PlainModel):
    """Asks for the length of the run, for which Lightning makes the training loader before a checkpoint is read."""

    length: int | None = None  # of its schedule; None for that of the run

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        steps = self.length or int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Record(pl.Callback):
    """Writes the samples of each training step, and the weights at the end, a file for each rank and start."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: list, index: int) -> None:
        with (self.folder / f"samples_{trainer.global_rank}.jsonl").open("a") as file:
            step, epoch = trainer.global_step, trainer.current_epoch
            file.write(json.dumps({"epoch": epoch, "step": step, "ids": batch[2].tolist()}) + "\n")

    def on_fit_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        weights = tree_map_only(DTensor, DTensor.full_tensor, module.state_dict())
        torch.save(weights, self.folder / f"weights_{trainer.global_rank}.pt")


class KilledInTest(pl.Callback):
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        os._exit(9)


class PartialModel(PlainModel):
    """Keeps a partial among its hyperparameters, as templates do whose config makes the optimizer."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer], width: int = 16) -> None:
        super().__init__(width)
        self.save_hyperparameters()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.hparams.optimizer(self.parameters())


class Buckets(Sampler[list[int]]):
    """Forms batches of similar samples, of at most so much in total, as those of texts and speech do."""

    def __init__(self, lengths: Sequence[float], most: float) -> None:
        self.batches: list[list[int]] = [[]]
        for index in sorted(range(len(lengths)), key=lengths.__getitem__):
            if sum(lengths[one] for one in self.batches[-1]) + lengths[index] > most:
                self.batches.append([])
            self.batches[-1].append(index)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter([self.batches[at] for at in torch.randperm(len(self.batches)).tolist()])


class BucketsData(PlainData):
    def train_dataloader(self) -> DataLoader:
        return self._formed(Points(self.samples))

    def val_dataloader(self) -> DataLoader:
        return self._formed(Points(37, 1))

    def test_dataloader(self) -> DataLoader:
        return self._formed(Points(41, 2))

    def _formed(self, points: Points) -> DataLoader:
        buckets = Buckets((points.x[:, 0].abs() + 1).tolist(), 24.0)
        return DataLoader(points, batch_sampler=buckets, num_workers=self.workers)


class UsedByRank0(PlainModel):
    """Whose scale one rank alone uses in a step, by default the second."""

    def __init__(self, step: int = 1) -> None:
        super().__init__()
        self.step = step
        self.scale = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if self.global_step == self.step and self.global_rank else loss * self.scale


class UsedUnevenly(PlainModel):
    """Whose branch one rank alone uses in the second step, in one of its micro-batches, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.never = torch.nn.Linear(2, 4), torch.nn.Linear(3, 5)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        is_left_out = self.global_step == 1 and (self.global_rank or batch_idx % 2)
        return nn.functional.cross_entropy(logits if is_left_out else logits + self.branch(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.5)


class ManualModel(PlainModel):
    """Two optimizers by hand, as a GAN has them."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return loss

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(layer.parameters(), lr=self.hparams.lr) for layer in (self.net[0], self.net[3])]


class GanModel(PlainModel):
    """As GANs do: each of two optimizers has a loss of its own, which reaches its own parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(2, 4)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        for part, optimizer in zip((self.net, self.critic), self.optimizers(), strict=True):
            loss = nn.functional.cross_entropy(part(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(part.parameters(), lr=self.hparams.lr) for part in (self.net, self.critic)]


class AutomaticGanModel(GanModel):
    """Whose author has forgotten that Lightning steps a single optimizer by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True


class PlateauModel(PlainModel):
    """Halves its rate when a validation has improved nothing: a schedule by epochs, or by steps."""

    def __init__(self, interval: str = "epoch", frequency: int = 1) -> None:
        super().__init__()
        self.when = {"interval": interval, "frequency": frequency}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss", **self.when}}
