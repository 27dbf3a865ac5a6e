"""Adam's step in one kernel for many parameters, in place of some for each, whatever made the optimizer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer

from lightswitch.mixins import Mixin, with_mixin


class FusedStep(Callback):
    """Callback that lets Adam and AdamW step by torch's fused kernel, where nothing else was asked for.

    It acts once the strategy has placed the parameters, and before a checkpoint's state is read: the kernel wants that
    on the device.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            fuse(optimizer)
        plugin = trainer.precision_plugin
        if isinstance(plugin, MixedPrecision) and plugin.scaler is None:
            trainer.strategy.precision_plugin = with_mixin(_ClipsFused, plugin)


class _ClipsFused(Mixin, Precision):
    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Clip where nothing scales gradients: Lightning refuses it beside a fused optimizer in bfloat16, too."""
        Precision.clip_gradients(self, *args, **kwargs)


def fuse(optimizer: Optimizer) -> None:
    """Let each group of an optimizer step by the fused kernel, if it has one for the group's parameters.

    The constructor's ``fused=True`` also lets the optimizer unscale gradients, after they are clipped; this does not.
    """
    if type(optimizer) not in (Adam, AdamW):
        return
    for group in optimizer.param_groups:
        if group["fused"] is None and group["foreach"] is None and not group["differentiable"]:
            group["fused"] = _has_kernel(group["params"]) or None


def _has_kernel(parameters: list[nn.Parameter]) -> bool:
    """Return whether torch's fused kernel takes parameters: real and dense ones, not sharded over several meshes."""
    meshes: set[Any] = {parameter.device_mesh if isinstance(parameter, DTensor) else None for parameter in parameters}
    return len(meshes) == 1 and all(
        parameter.device.type in ("cpu", "cuda") and parameter.is_floating_point() and parameter.is_contiguous()
        for parameter in parameters
    )
