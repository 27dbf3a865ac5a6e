"""What each rank holds of a model, written down for a test."""

from __future__ import annotations

import json
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.conftest import Finished

WITNESS = (
    "callbacks.shards._target_=tests.strategies.shards.Shards",
    "callbacks.shards.folder=${hydra:runtime.output_dir}",
    "callbacks.grad_norm._target_=lightswitch.monitoring.grad_norm.GradNorm",
)


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
            "built_on": getattr(module, "built_on", None),
        }
        (self.folder / f"elements_{trainer.global_rank}.json").write_text(json.dumps(counted))

    def _save(self, trainer: pl.Trainer, module: pl.LightningModule, when: str) -> None:
        tensors = {name: _whole(tensor) for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
        torch.save(tensors, self.folder / f"{when}_{trainer.global_rank}.pt")


def held(run: Finished, rank: int) -> dict[str, int]:
    return json.loads((run.run_dir / f"elements_{rank}.json").read_text())


def tensors(run: Finished, when: str, rank: int) -> dict[str, bytes]:
    """To the bit."""
    saved = torch.load(run.run_dir / f"{when}_{rank}.pt")
    return {name: tensor.flatten().view(torch.uint8).numpy().tobytes() for name, tensor in saved.items()}


def largest_difference(found: Finished, expected: Finished, metric: str) -> float:
    a, b = found.column(metric), expected.column(metric)
    assert a.keys() == b.keys()
    return max(abs(a[step] - b[step]) for step in b)
