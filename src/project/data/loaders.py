"""Base classes of the data modules and of their datasets, which return whole batches."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

Pair: TypeAlias = tuple[Tensor, Tensor]  # inputs and targets, of one sample or of a batch


class BatchedDataset(Dataset[Pair], ABC):
    """A map-style dataset whose `__getitems__` indexes once for a batch, in place of collating single samples."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> Pair: ...

    def __getitem__(self, index: int) -> Pair:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]


class BatchedData(LightningDataModule, ABC):
    """Train, validation and test loaders over the datasets that `load` returns when a run begins.

    Args:
        batch_size: largest batch of an evaluation; in training, global_batch_size and micro_batch_size decide.
        num_workers: number of processes per device that read ahead; 0 reads in the training process.
        pin_memory: copy batches to pinned memory, for asynchronous copies to a GPU; on GPUs the engine always does.
    """

    def __init__(self, batch_size: int = 64, num_workers: int = 0, pin_memory: bool = False) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.splits: dict[str, Dataset[Pair]] = {}

    @abstractmethod
    def load(self) -> Mapping[str, Dataset[Pair]]:
        """Return the datasets of `train`, `val` and `test`."""

    def setup(self, stage: str) -> None:
        self.splits = self.splits or dict(self.load())

    def train_dataloader(self) -> DataLoader[Pair]:
        return self.loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[Pair]:
        return self.loader("val")

    def test_dataloader(self) -> DataLoader[Pair]:
        return self.loader("test")

    def predict_dataloader(self) -> DataLoader[Pair]:
        return self.loader("test")

    def loader(self, split: str, shuffle: bool = False) -> DataLoader[Pair]:
        return DataLoader(
            self.splits[split],
            batch_size=self.batch_size,
            shuffle=shuffle and not isinstance(self.splits[split], IterableDataset),
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            persistent_workers=self.num_workers > 0,
            collate_fn=self.collate,
        )

    def collate(self, batch: Any) -> Any:
        """Return a batch from `__getitems__` unchanged; stack single samples, from a wrapper without `__getitems__`."""
        return batch if isinstance(batch, tuple) else default_collate(batch)
