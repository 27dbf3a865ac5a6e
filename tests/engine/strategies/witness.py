"""What each rank holds of a model, for a test to see, whatever spreads it over the ranks."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightswitch.checkpoints.names import own_name


class Witness(pl.Callback):
    """The whole tensors at the start and at the end, and the elements that this rank has of them."""

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.start = _tensors(module)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.end = _tensors(module)
        optimizer = getattr(trainer.optimizers[0], "optimizer", trainer.optimizers[0])  # DeepSpeed's has another within
        states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor) and t.ndim]
        is_trained = {own_name(name): parameter.requires_grad for name, parameter in module.named_parameters()}
        self.held = {
            "parameters": sum(_local(parameter).numel() for parameter in module.parameters()),
            "whole": sum(self.end[name].numel() for name in is_trained),
            "optimizer": sum(_local(tensor).numel() for tensor in states),
            "trained": sum(self.end[name].numel() for name in is_trained if is_trained[name]),
            "built_on": getattr(module, "built_on", None),
        }


def _tensors(module: pl.LightningModule) -> dict[str, Tensor]:
    found = [*module.named_parameters(), *module.named_buffers()]
    return {own_name(name): whole(tensor) for name, tensor in found}


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


def to_the_bit(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.flatten().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}
