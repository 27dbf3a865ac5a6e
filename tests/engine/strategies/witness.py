"""What each rank holds of a model, written down for a test, whatever spreads it over the ranks."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lightswitch.checkpoints.names import own_name
from tests.engine.conftest import Finished
from tests.engine.tiny import NO_CHECKPOINTS

WITNESS = (
    "callbacks.witness._target_=tests.engine.strategies.witness.Witness",
    "callbacks.witness.folder=${hydra:runtime.output_dir}",
)
GRAD_NORM = ("callbacks.grad_norm._target_=lightswitch.monitoring.grad_norm.GradNorm",)
COMMON = (*NO_CHECKPOINTS, *WITNESS, *GRAD_NORM, "trainer.accelerator=cpu")


class Witness(pl.Callback):
    """The whole tensors at the start and at the end, and the elements that each rank has of them."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._save(trainer, module, "start")

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        saved = self._save(trainer, module, "end")
        optimizer = getattr(trainer.optimizers[0], "optimizer", trainer.optimizers[0])  # DeepSpeed's has another within
        states = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
        trained = {own_name(name): parameter.requires_grad for name, parameter in module.named_parameters()}
        counted = {
            "parameters": sum(_local(parameter).numel() for parameter in module.parameters()),
            "whole": sum(saved[name].numel() for name in trained),
            "optimizer": sum(_local(tensor).numel() for tensor in states),
            "trained": sum(saved[name].numel() for name, is_trained in trained.items() if is_trained),
            "built_on": getattr(module, "built_on", None),
        }
        (self.folder / f"elements_{trainer.global_rank}.json").write_text(json.dumps(counted))

    def _save(self, trainer: pl.Trainer, module: pl.LightningModule, when: str) -> dict[str, Tensor]:
        with _gathered_by_fsdp1(trainer):
            found = [*module.named_parameters(), *module.named_buffers()]
            tensors = {own_name(name): whole(tensor) for name, tensor in found}
        torch.save(tensors, self.folder / f"{when}_{trainer.global_rank}.pt")
        return tensors


def whole(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach().clone()
    if not hasattr(tensor, "ds_id"):
        return tensor.detach().clone()
    import deepspeed

    with deepspeed.zero.GatheredParameters([tensor]):
        return tensor.detach().clone()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else getattr(tensor, "ds_tensor", tensor)


def _gathered_by_fsdp1(trainer: pl.Trainer) -> AbstractContextManager[None]:
    if isinstance(trainer.model, FullyShardedDataParallel):
        return FullyShardedDataParallel.summon_full_params(trainer.model, writeback=False)
    return nullcontext()


def held(run: Finished, rank: int) -> dict[str, int]:
    return json.loads((run.run_dir / f"elements_{rank}.json").read_text())


def tensors(run: Finished, when: str, rank: int) -> dict[str, bytes]:
    """To the bit."""
    saved = torch.load(run.run_dir / f"{when}_{rank}.pt")
    return {name: tensor.flatten().view(torch.uint8).numpy().tobytes() for name, tensor in saved.items()}
