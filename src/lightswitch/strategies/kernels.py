"""Faster computation of the same run: a fused Adam step, TF32 matrix products, cuDNN attention, and garbage collection
between steps."""

from __future__ import annotations

import gc
import logging
from contextlib import ExitStack
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Adam, AdamW, Optimizer

from lightswitch.mixins import Mixin, with_mixin

log = logging.getLogger(__name__)

_WITH_TF32 = (8, 0)  # compute capability of Ampere
_WITH_CUDNN = (9, 0)  # compute capability of Hopper, for which FlashAttention 2 was not written
_BY_SPEED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_COLLECTS_EVERY_N_STEPS = 50


class FusedStep(Callback):
    """Callback that lets Adam and AdamW step by torch's fused kernel, unless the user chose an implementation.

    It runs after the strategy has placed the parameters, and before a checkpoint's optimizer state is read: the kernel
    needs that state on the device.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            fuse(optimizer)
        plugin = trainer.precision_plugin
        if isinstance(plugin, MixedPrecision) and plugin.scaler is None:
            trainer.strategy.precision_plugin = with_mixin(_ClipsFused, plugin)


class _ClipsFused(Mixin, Precision):
    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Clip without a gradient scaler: with a fused optimizer, Lightning refuses to clip even in bfloat16."""
        Precision.clip_gradients(self, *args, **kwargs)


def fuse(optimizer: Optimizer) -> None:
    """Let each group of an optimizer step by the fused kernel, if it supports the group's parameters.

    Unlike the constructor's ``fused=True``, this does not let the optimizer unscale gradients, after they are clipped.
    """
    if type(optimizer) not in (Adam, AdamW):
        return
    for group in optimizer.param_groups:
        if group["fused"] is None and group["foreach"] is None and not group["differentiable"]:
            group["fused"] = _has_kernel(group["params"]) or None


def _has_kernel(parameters: list[nn.Parameter]) -> bool:
    """Return whether torch's fused kernel supports parameters: floating-point, contiguous, and all on one device mesh
    or none."""
    meshes: set[Any] = {parameter.device_mesh if isinstance(parameter, DTensor) else None for parameter in parameters}
    return len(meshes) == 1 and all(
        parameter.device.type in ("cpu", "cuda") and parameter.is_floating_point() and parameter.is_contiguous()
        for parameter in parameters
    )


class MatmulPrecision(Callback):
    """Callback that sets the precision of 32-bit matrix products in each process, and logs if TF32 would be faster.

    Args:
        precision: highest, 32 bits; high, TensorFloat-32, with a fraction of 10 bits instead of 23; medium, bfloat16.
    """

    def __init__(self, precision: Literal["highest", "high", "medium"]) -> None:
        self.precision = precision
        self._is_told = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        torch.set_float32_matmul_precision(self.precision)
        if trainer.is_global_zero and not self._is_told:
            self._is_told = True
            if self.precision == "highest" and _gains(trainer):
                log.info("products   32-bit matrix products; matmul_precision=high uses TF32, several times faster")


def _gains(trainer: Trainer) -> bool:
    """Return whether a run computes in 32 bits on a GPU with tensor cores for TF32."""
    device = trainer.strategy.root_device
    if device.type != "cuda" or torch.version.hip is not None or str(trainer.precision) != "32-true":
        return False
    return torch.cuda.get_device_capability(device) >= _WITH_TF32


class AttentionBackends(Callback):
    """Callback that lets `scaled_dot_product_attention` try cuDNN's kernel before FlashAttention 2, on Hopper GPUs and
    later. For shapes and masks that cuDNN does not support, torch tries the next kernel."""

    def __init__(self) -> None:
        self._until_teardown = ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._until_teardown.close()
        if has_fast_cudnn(trainer.strategy.root_device):
            self._until_teardown.enter_context(sdpa_kernel(_BY_SPEED, set_priority=True))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._until_teardown.close()


def has_fast_cudnn(device: torch.device) -> bool:
    """Return whether to prefer cuDNN's attention: on NVIDIA GPUs from Hopper on, without deterministic algorithms."""
    if device.type != "cuda" or torch.version.hip is not None or torch.are_deterministic_algorithms_enabled():
        return False
    return torch.cuda.get_device_capability(device) >= _WITH_CUDNN


class GarbageBetweenSteps(Callback):
    """Callback that collects Python's garbage after optimizer steps, after the same steps on all ranks.

    Otherwise each rank collects at a different time, while the others wait. Young objects are collected after each
    step, so that reference cycles release a step's tensors by then. All objects, except those of imports, which
    launch/build has frozen, are collected every 50 steps. During evaluation, Python collects automatically.
    """

    def __init__(self) -> None:
        self._is_training = self._was_enabled = False
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_training, self._was_enabled, self._step = True, gc.isenabled(), trainer.global_step
        gc.disable()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step != self._step:  # not between micro-batches
            self._step = trainer.global_step
            gc.collect(2 if self._step % _COLLECTS_EVERY_N_STEPS == 0 else 0)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_training and self._was_enabled:
            gc.enable()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_training:
            gc.disable()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end()

    def _end(self) -> None:
        if self._is_training and self._was_enabled:
            gc.enable()
        self._is_training = False
