"""A model, its data and a callback that raise what they are told to, where they are told to."""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.engine.fault_tolerance.failing import run_out_of_memory
from tests.engine.plain import PlainData, PlainModel, Points


def fail(error: str) -> None:
    if error == "value":
        raise ValueError("this is no batch of mine")
    if error == "of C":
        int("three")
    if error == "exit":
        sys.exit(2)
    if error == "interrupt":
        raise KeyboardInterrupt
    if error == "group":
        raise ExceptionGroup("several", [ValueError("the first"), KeyError("the second")])  # noqa: F821  # from 3.11 on
    if error == "unpicklable":
        raise type("Unpicklable", (RuntimeError,), {})(lambda: None)
    if error == "noted":
        told = RuntimeError("this is the bug")
        told.add_note("and this a note")
        raise told
    if error == "out of memory":
        run_out_of_memory()
    if error == "no device memory":  # as torch raises it on a GPU
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if error == "os._exit":
        os._exit(9)


class RaisingModel(PlainModel):
    """
    Args:
        where: a hook; for a step, with the number of its batch, as in `training_step 3`.
        rank: None for all.
    """

    def __init__(self, error: str, where: str, rank: int | None = 1) -> None:
        super().__init__()
        self.error, self.where, self.rank = error, where, rank
        if where == "__init__":
            fail(error)

    def setup(self, stage: str) -> None:
        self._reach(f"setup {getattr(stage, 'value', stage)}")

    def configure_optimizers(self) -> Any:
        self._reach("configure_optimizers")
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._reach(f"training_step {batch_idx}")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._reach("sanity_check" if self.trainer.sanity_checking else "validation_step")
        super().validation_step(batch, batch_idx)

    def _reach(self, place: str) -> None:
        if place == self.where and self.rank in (None, self.trainer.global_rank):
            fail(self.error)


class RaisingCallback(pl.Callback):
    def __init__(self, error: str, batch: int) -> None:
        self.error, self.batch = error, batch

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch and trainer.global_rank == trainer.world_size - 1:
            fail(self.error)


class RaisingPoints(Points):
    def __init__(self, samples: int, error: str, index: int) -> None:
        super().__init__(samples)
        self.error, self.index = error, index

    def __getitem__(self, index: int) -> Any:
        if index == self.index:
            fail(self.error)
        return super().__getitem__(index)


class RaisingData(PlainData):
    """
    Args:
        where: prepare_data, setup, train_dataloader, or sample, of the training set.
    """

    def __init__(self, error: str, where: str, workers: int = 0, samples: int = 640) -> None:
        super().__init__(samples=samples, workers=workers)
        self.error, self.where = error, where

    def prepare_data(self) -> None:
        self._reach("prepare_data")

    def setup(self, stage: str) -> None:
        self._reach("setup")

    def train_dataloader(self) -> DataLoader:
        self._reach("train_dataloader")
        points = RaisingPoints(self.samples, self.error, 150 if self.where == "sample" else -1)
        return DataLoader(points, self.batch_size, num_workers=self.workers)

    def _reach(self, place: str) -> None:
        if place == self.where:
            fail(self.error)
