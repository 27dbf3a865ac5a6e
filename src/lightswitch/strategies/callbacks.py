"""The engine's callback around strategies: what a run refuses, and faster computation of the same run."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer

from lightswitch.checkpoints.finetuning import follow_strategy
from lightswitch.errors import Refused, RefusedRequest
from lightswitch.hooked_strategy import Mixin, callbacks_of, with_mixin
from lightswitch.strategies import ema
from lightswitch.strategies.ema import EMA
from lightswitch.strategies.units import Compilation

# Callbacks of Lightning that are refused, by class name, because older versions of Lightning lack some
NOWHERE = {
    "BatchSizeFinder": "global_batch_size sets the batch, and the micro-batch size does not change the results; type "
    "micro_batch_size=auto for the largest that fits",
    "GradientAccumulationScheduler": "each step uses global_batch_size samples in every epoch; leave it out, and type "
    "global_batch_size=N; to change N later, start a new run from this run's weights with init_from=PATH",
    "LearningRateFinder": "compare short runs with different learning rates instead; type python train.py -m "
    "optimizer.lr=1e-4,1e-3,1e-2 trainer.max_steps=100",
    "ModelPruning": "runs could not be resumed, because its checkpoints do not match the module that it prepares; "
    "prune in the module's constructor, with torch.nn.utils.prune",
    "SpikeDetection": "runs could not be resumed, because it can't load its saved state; on_nan=stop ends a run whose "
    "loss is not finite, and trainer.gradient_clip_val=N limits a step",
    "StochasticWeightAveraging": "a resumed run could not continue it, because it replaces the schedule during the "
    "run; type callbacks=[default,ema] callbacks.ema.decay=null for a mean of weights",
    "WeightAveraging": "it averages whole copies of a module, and ends a run with the average in place of the trained "
    "weights; type callbacks=[default,ema] callbacks.ema.decay=N, which averages shards and keeps both",
}
NOT_UNDER_DEEPSPEED = {
    "BaseFinetuning": "DeepSpeed trains the parameters that require gradients when it is set up; use strategy=fsdp",
}

_COLLECTS_OLDER, _COLLECTS_ALL = 50, 1000  # every n steps


class StrategyCallback(Callback):
    """Callback that refuses unsupported callbacks, and speeds a run up without changing it.

    Adam and AdamW step by torch's fused kernel, unless the user chose an implementation. Garbage is collected after
    optimizer steps, after the same steps on all ranks: otherwise each rank collects at a different time, while the
    others wait. Young objects are collected after each step, so that reference cycles release a step's tensors by then;
    those that survived it every 50 steps; and all objects, except those of imports, which launch/build has frozen,
    every 1,000 steps: to search what a run itself keeps takes some milliseconds. During evaluation, Python collects
    automatically.

    Args:
        matmul_precision: of 32-bit matrix products: highest, 32 bits; high, TensorFloat-32, with a fraction of 10 bits
            instead of 23; medium, bfloat16.
        compilation: compiles the model once it is built; None for none.
    """

    def __init__(
        self,
        matmul_precision: Literal["highest", "high", "medium"] = "highest",
        compilation: Compilation | None = None,
    ) -> None:
        self.matmul_precision, self.compilation = matmul_precision, compilation
        self._collects, self._step = False, 0  # whether Python collected before training, which stops it

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if problems := list(callback_problems(callbacks_of(trainer), trainer.strategy)):
            raise RefusedRequest(problems)
        follow_strategy(callbacks_of(trainer))
        torch.set_float32_matmul_precision(self.matmul_precision)
        if self.compilation is not None:
            self.compilation.compile_when_built(trainer, pl_module)
            self.compilation = None  # a test after fit has the same model

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adapt to the strategy, which has placed the parameters. No optimizer state is read before: fused steps need
        it on the device."""
        use_fused_steps(trainer)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Check that a run whose checkpoint holds averages resumes with them.

        Raises:
            Refused: it has no callback of averages, and would train on from the average.
        """
        averages = any(isinstance(callback, EMA) for callback in callbacks_of(trainer))
        if trainer.state.fn == TrainerFn.FITTING and not averages and ema.STATE in checkpoint:
            raise Refused(
                "the model of this checkpoint is an average, beside the trained weights, which callbacks.ema resumes; "
                "type callbacks=[default,ema], or start a new run from the average with init_from=PATH"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for callback in callbacks_of(trainer):
            if isinstance(callback, Timer):
                callback.on_fit_start(trainer)  # Lightning called it before the checkpoint was read
        self._collects, self._step = gc.isenabled(), trainer.global_step
        gc.disable()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if (step := trainer.global_step) != self._step:  # not between micro-batches
            self._step = step
            gc.collect((self._step % _COLLECTS_OLDER == 0) + (self._step % _COLLECTS_ALL == 0))  # the generation

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._collects:
            gc.enable()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._collects:
            gc.disable()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._collects:
            gc.enable()
        self._collects = False

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)


# Callbacks that are refused


def callback_problems(callbacks: Iterable[Callback], strategy: Strategy) -> Iterator[str]:
    """Yield why callbacks, including subclasses of Lightning's, are not supported, and what to use instead."""
    why = {**NOWHERE, **(NOT_UNDER_DEEPSPEED if isinstance(strategy, DeepSpeedStrategy) else {})}
    for callback in callbacks:
        of_lightning = {base.__name__ for base in type(callback).__mro__ if base.__module__.startswith("lightning.")}
        yield from (f"{type(callback).__name__}: {why[name]}" for name in sorted(of_lightning & why.keys()))


# Faster computation of the same run


def use_fused_steps(trainer: Trainer) -> None:
    """Let the optimizers of a Trainer step by torch's fused kernel, with gradients that are clipped."""
    for optimizer in trainer.optimizers:
        fuse(optimizer)
    plugin: Any = trainer.precision_plugin
    if isinstance(plugin, MixedPrecision) and plugin.scaler is None:
        plugin = with_mixin(_ClipsFused, plugin)
    is_lightnings = type(plugin).clip_grad_by_norm is Precision.clip_grad_by_norm
    if is_lightnings and not isinstance(trainer.strategy, DeepSpeedStrategy):
        plugin = with_mixin(_ClipsAtOnce, plugin)
    trainer.strategy.precision_plugin = plugin


class _ClipsFused(Mixin, Precision):
    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Clip without a gradient scaler: with a fused optimizer, Lightning refuses to clip even in bfloat16."""
        Precision.clip_gradients(self, *args, **kwargs)


class _ClipsAtOnce(Mixin, Precision):
    @torch.no_grad()
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip as torch.nn.utils.clip_grad_norm_ does, to the bit, by the same operators.

        In its three functions, it sorts the gradients twice by device and dtype and enters five contexts, which takes
        a small model longer than the operators.
        """
        gradients = [one.grad for one in self.main_params(optimizer) if one.grad is not None]
        kinds = {(type(one), one.device, one.dtype) for one in gradients}
        kind, device, _ = kinds.pop() if len(kinds) == 1 else (None, torch.device("cpu"), None)
        if kind is not Tensor or device.type not in ("cpu", "cuda"):
            super().clip_grad_by_norm(optimizer, clip_val)
            return
        norms = torch.stack(torch._foreach_norm(gradients, 2.0))
        scale = float(clip_val) / (torch.linalg.vector_norm(norms, 2.0) + 1e-6)
        torch._foreach_mul_(gradients, scale.clamp(max=1.0))


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
