"""Gradient norm as a logged metric."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

log = logging.getLogger(__name__)


class GradNorm(Callback):
    """Callback that logs `grad_norm` at each logged step: the L2 norm over the optimizer's parameters, before clipping.

    It is the norm of the complete gradient under every strategy, without the loss scale of 16-mixed. DeepSpeed does not
    expose its gradients: the callback then only logs a warning.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy, DeepSpeedStrategy) and trainer.is_global_zero:
            log.warning("grad_norm is not logged under DeepSpeed, which does not expose its gradients")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if isinstance(trainer.strategy, DeepSpeedStrategy) or not trainer._logger_connector.should_update_logs:
            return
        norm = _norm_of_step(trainer.strategy.model, optimizer) / _loss_scale(trainer, optimizer)
        for logger in trainer.loggers:
            logger.log_metrics({"grad_norm": norm}, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def _norm_of_step(model: Any, optimizer: Optimizer) -> float:
    if isinstance(model, FullyShardedDataParallel):
        # Each rank holds slices of flattened gradients, and only FSDP knows over which ranks to sum them.
        return model.clip_grad_norm_(math.inf).item()
    return gradient_norm(p for group in optimizer.param_groups for p in group["params"]).item()


@torch.no_grad()
def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm of all gradients together, a scalar tensor. Collective if parameters are sharded."""
    norms = [get_total_norm([p.grad for p in those if p.grad is not None]) for those in by_mesh(parameters).values()]
    return get_total_norm([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms])


def by_mesh(parameters: Iterable[Tensor]) -> dict[Any, list[Tensor]]:
    """Group the parameters that have gradients by device mesh: torch can't combine DTensors of different meshes."""
    found: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            found[getattr(parameter.grad, "device_mesh", None)].append(parameter)
    return found


def _loss_scale(trainer: Trainer, optimizer: Optimizer) -> float:
    """Return the scale still in the gradients: a fused optimizer divides by the loss scale only in its step."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return 1.0
    return float(scaler.get_scale())
