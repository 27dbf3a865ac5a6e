"""Optimizer and schedule in the form that `configure_optimizers` returns, from the factories that a model is given."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from project.schedule import WarmupDecay

OptimizerFactory = Callable[..., Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]


def configured(
    model: LightningModule, optimizer: OptimizerFactory, scheduler: SchedulerFactory | None
) -> OptimizerLRScheduler:
    """Return an optimizer over its groups of parameters, with a schedule that advances at each optimizer step."""
    kind = getattr(optimizer, "func", optimizer)  # of a functools.partial
    if kind is getattr(torch.optim, "Muon", None):
        raise ValueError("torch.optim.Muon takes matrices alone; type optimizer=muon, which uses AdamW for the rest")
    built = optimizer(getattr(kind, "groups", decay_groups)(model))
    if scheduler is None:
        return built
    if isinstance(scheduler, WarmupDecay) and scheduler.total_steps == -1:
        scheduler = scheduler.over(model.trainer.estimated_stepping_batches)
    return {"optimizer": built, "lr_scheduler": {"scheduler": scheduler(built), "interval": "step"}}


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups: matrices of linear layers and embeddings with weight decay, all others without.

    Frozen parameters are left out. The type of the module decides, because a parameter's number of dimensions is lost
    if a strategy flattens or partitions it.
    """
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                groups[name == "weight" and is_matrix(module)].append(parameter)
    # tied weights belong to two modules
    decaying = {"params": [*dict.fromkeys(groups[True])]}
    others = {"params": [*dict.fromkeys(groups[False])], "weight_decay": 0.0}
    return [group for group in (decaying, others) if group["params"]]


def is_matrix(module: nn.Module) -> bool:
    """Return whether a module's weight is a matrix: of a linear layer, an embedding, or transformers' Conv1D."""
    return isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__ == "Conv1D"
