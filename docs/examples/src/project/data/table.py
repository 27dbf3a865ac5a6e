"""Rows of a table: columns of numbers, of which one is the class."""

from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Subset, TensorDataset


class Table(LightningDataModule):
    """The columns but `label` are the inputs, each brought to mean 0 and deviation 1 over the rows trained on."""

    def __init__(self, file: str, label: str, classes: int, batch_size: int = 64) -> None:
        super().__init__()
        self.file, self.label, self.classes, self.batch_size = Path(file), label, classes, batch_size
        if not self.file.is_file():
            raise FileNotFoundError(f"file: {file} is not there; type data.file=PATH")

    def setup(self, stage: str) -> None:
        columns = read(self.file)
        labels = torch.from_numpy(columns.pop(self.label).astype(np.int64))
        inputs = torch.from_numpy(np.stack(list(columns.values()), axis=1).astype(np.float32))
        order = np.random.default_rng(0).permutation(len(labels))  # the same parts in every run
        parts = dict(zip(("val", "test", "train"), np.split(order, [len(order) // 10, len(order) // 5]), strict=True))
        deviation, mean = torch.std_mean(inputs[parts["train"]], dim=0)
        rows = TensorDataset((inputs - mean) / deviation, labels)
        self.parts = {name: Subset(rows, part.tolist()) for name, part in parts.items()}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.parts["train"], self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.parts["val"], self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.parts["test"], self.batch_size)


def read(file: Path) -> dict[str, np.ndarray]:
    """The columns of a file by name."""
    if file.suffix == ".parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(file)
        return {name: table[name].to_numpy() for name in table.column_names}
    rows = np.genfromtxt(file, delimiter=",", names=True)
    return {name: rows[name] for name in rows.dtype.names}
