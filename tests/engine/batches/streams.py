"""Streams as people write them, and a DataModule over them: they know nothing of lightswitch."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.engine.plain import PlainData, PlainModel, Points


class Stream(IterableDataset):
    """The samples of a map-style dataset in a row; shuffled in a buffer of so many, by Python's generator."""

    def __init__(self, samples: Any, buffer: int = 0) -> None:
        self.samples, self.buffer = samples, buffer

    def __iter__(self) -> Iterator[Any]:
        held: list[Any] = []
        for index in range(len(self.samples)):
            held.append(self.samples[index])
            if len(held) > self.buffer:
                yield held.pop(random.randrange(len(held)))
        while held:
            yield held.pop(random.randrange(len(held)))


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.samples)


class StatefulStream(IterableDataset):
    """Goes on from its state, in an order of the epoch that it was told; counts the samples that it has read."""

    def __init__(self, samples: Any) -> None:
        self.samples, self.epoch, self.index, self.read = samples, 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.index = epoch, 0

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.index < len(order):
            self.index, self.read = self.index + 1, self.read + 1
            yield self.samples[order[self.index - 1]]
        self.index = 0

    def state_dict(self) -> dict[str, Any]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.index = state["index"]


class WorkerSplit(Stream):
    """Splits itself by workers, as torch's documents show it."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter([self.samples[index] for index in range(first, len(self.samples), stride)])


class RankSplit(Stream):
    """Splits itself by ranks."""

    def __iter__(self) -> Iterator[Any]:
        formed = torch.distributed.is_initialized()
        rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if formed else (0, 1)
        return iter([self.samples[index] for index in range(rank, len(self.samples), world)])


class AskingModel(PlainModel):
    """Asks for the length of the run, for which Lightning reads a first batch before a checkpoint is read."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


KINDS = {"plain": Stream, "sized": SizedStream, "stateful": StatefulStream, "workers": WorkerSplit, "ranks": RankSplit}


class StreamData(PlainData):
    """PlainData, all of whose sets are streams."""

    def __init__(self, kind: str = "plain", buffer: int = 0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.kind, self.buffer = kind, buffer

    def train_dataloader(self) -> DataLoader:
        stream = KINDS[self.kind](Points(self.samples, noise=self.noise))
        stream.buffer = self.buffer
        return DataLoader(stream, self.batch_size, num_workers=self.workers, drop_last=self.drop_last)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Stream(Points(37, 1)), self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(Stream(Points(41, 2)), self.batch_size)

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(Stream(Points(41, 2)), self.batch_size)


class KillOnceSaved(pl.Callback):
    """SIGKILL in the eighth step, as soon as a checkpoint is there."""

    def __init__(self, run_dir: str) -> None:
        self.last = Path(run_dir) / "checkpoints" / "last.ckpt"

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if trainer.global_step == 7:
            while not self.last.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
