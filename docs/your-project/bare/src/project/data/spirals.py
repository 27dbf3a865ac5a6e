"""Points in the plane on the arms of spirals."""

import math

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

Pair = tuple[Tensor, ...]


class Spirals(LightningDataModule):
    """2,000 points to train on, 500 each to validate and to test: (2,) and the arm that each is on."""

    def __init__(self, arms: int = 3, noise: float = 0.1, batch_size: int = 64, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size, self.num_workers = batch_size, num_workers
        self.splits = {
            split: spirals(points, arms, noise, seed)
            for seed, (split, points) in enumerate({"train": 2000, "val": 500, "test": 500}.items())
        }

    def train_dataloader(self) -> DataLoader[Pair]:
        return self.loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[Pair]:
        return self.loader("val")

    def test_dataloader(self) -> DataLoader[Pair]:
        return self.loader("test")

    def predict_dataloader(self) -> DataLoader[Pair]:
        return self.loader("test")

    def loader(self, split: str, shuffle: bool = False) -> DataLoader[Pair]:
        return DataLoader(self.splits[split], self.batch_size, shuffle, num_workers=self.num_workers)


def spirals(points: int, arms: int, noise: float, seed: int) -> Dataset[Pair]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(arms, (points,), generator=generator)
    radius = torch.rand(points, generator=generator)
    angle = 2 * math.pi * (labels / arms + 0.7 * radius) + noise * torch.randn(points, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), labels)
