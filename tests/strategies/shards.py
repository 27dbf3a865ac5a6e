"""What each rank holds of a model, written down for a test."""

from __future__ import annotations

import json
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Shards(pl.Callback):
    """The whole tensors at the start and at the end, and the elements that each rank has of them."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._save(trainer, module, "start")

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._save(trainer, module, "end")
        parameters = list(module.parameters())
        states = [t for state in trainer.optimizers[0].state.values() for t in state.values() if t.ndim]
        counted = {
            "parameters": sum(_local(p).numel() for p in parameters),
            "whole": sum(p.numel() for p in parameters),
            "optimizer": sum(_local(t).numel() for t in states),
            "trained": sum(p.numel() for p in parameters if p.requires_grad),
        }
        (self.folder / f"elements_{trainer.global_rank}.json").write_text(json.dumps(counted))

    def _save(self, trainer: pl.Trainer, module: pl.LightningModule, when: str) -> None:
        tensors = {name: _whole(tensor) for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
        torch.save(tensors, self.folder / f"{when}_{trainer.global_rank}.pt")
