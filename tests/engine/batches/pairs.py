"""A model that reads from two loaders at once, and writes down what it read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from tests.engine.plain import PlainData, PlainModel, Points


class PairsData(PlainData):
    """
    Args:
        mode: None for a plain dict of loaders, as most people write it.
    """

    def __init__(self, mode: str | None, a: int = 640, b: int = 320, workers: int = 0) -> None:
        super().__init__()
        self.mode, self.sizes, self.workers = mode, {"a": a, "b": b}, workers

    def train_dataloader(self) -> Any:
        loaders = {
            name: DataLoader(Points(size, offset), 8, shuffle=True, num_workers=self.workers)
            for offset, (name, size) in enumerate(self.sizes.items())
        }
        return CombinedLoader(loaders, self.mode) if self.mode else loaders


class PairsModel(PlainModel):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        parts = {name: part for name, part in batch.items() if part is not None}
        with (self.folder / f"read_{self.trainer.global_rank}.jsonl").open("a") as file:
            read = {name: part[2].tolist() for name, part in parts.items()}
            file.write(json.dumps({"step": self.trainer.global_step, **read}) + "\n")
        losses = [super(PairsModel, self).training_step(part, batch_idx) for part in parts.values()]
        return sum(losses[1:], losses[0])
