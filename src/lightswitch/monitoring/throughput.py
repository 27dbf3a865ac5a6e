"""Speed, memory and the norm of gradients as metrics, and the meter of speed, which the progress bar uses too."""

from __future__ import annotations

import logging
import resource
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from lightswitch.monitoring.metrics import batches, is_logged

log = logging.getLogger(__name__)
_FORMATS = {"16": "fp16", "bf16": "bf16", "64": "fp64"}  # by the prefix of a precision's name


class Throughput(Callback):
    """Callback that logs, at each logged step, the speed since the last logged step and the peak memory of rank 0.

    The time of validation and of saving checkpoints does not count; time spent waiting for data does. Memory is in GiB,
    speed in seconds per step, samples per second and tokens per second.

    Args:
        samples_per_step: the global batch size.
        tokens_per_sample: length of a sample in tokens, if samples are sequences.
        peak_tflops: peak arithmetic of a device by format (fp64, fp32, tf32, bf16, fp16), in 10¹² operations a second,
            for MFU, its utilization by the model's own operations (Chowdhery et al. 2022, appendix B).
    """

    def __init__(
        self,
        samples_per_step: int,
        tokens_per_sample: int | None = None,
        peak_tflops: Mapping[str, float] | None = None,
    ) -> None:
        self._samples_per_step = samples_per_step
        self._tokens_per_sample = tokens_per_sample
        self._peak_tflops = peak_tflops or {}
        self._step_tflop = 0.0
        self._counter: FlopCounterMode | None = None
        self._meter = Meter()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meter.start(batches(trainer))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._meter.resume()
        if self._peak_tflops and self._meter.is_warming_up and pl_module.automatic_optimization:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()  # type: ignore[no-untyped-call]  # torch has no types for it

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # likewise
            # without what activation checkpointing repeats, a backward pass takes twice the forward pass
            self._step_tflop += 3 * self._counter.get_total_flops() / 1e12 / Meter.WARMUP_STEPS
            self._counter = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if self._meter.is_warming_up:
            self._meter.read(batches(trainer))
        if not is_logged(trainer) or trainer.fit_loop._should_accumulate():
            return
        metrics = {"memory/peak_gib": peak_bytes(trainer.strategy.root_device) / 2**30}
        if (steps_per_second := self._meter.read(batches(trainer))) is not None:
            samples_per_second = steps_per_second * self._samples_per_step
            metrics["throughput/step_seconds"] = 1 / steps_per_second
            metrics["throughput/samples_per_second"] = samples_per_second
            if self._tokens_per_sample is not None:
                metrics["throughput/tokens_per_second"] = samples_per_second * self._tokens_per_sample
            if peak_tflops := self._peak(trainer.precision):
                metrics["throughput/mfu"] = self._step_tflop * steps_per_second / peak_tflops
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meter.pause()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._meter.pause()  # until the next batch starts

    def _peak(self, precision: str) -> float | None:
        """Return a device's peak arithmetic, if it and the operations of a step are known."""
        name = _FORMATS.get(precision.partition("-")[0], "fp32")
        if name == "fp32" and torch.get_float32_matmul_precision() != "highest":
            name = "tf32"
        return self._peak_tflops.get(name, self._peak_tflops.get("fp32")) if self._step_tflop else None


class Meter:
    """Meter of optimizer steps per second, updated at each step and each pause.

    The first steps warm up caches, allocators and data workers, and do not count.

    Args:
        window: number of readings over which the speed is measured, at least two.

    Attributes:
        steps_per_second: speed at the last reading; None until there are steps to measure.
    """

    WARMUP_STEPS = 3

    def __init__(self, window: int = 2) -> None:
        self._readings: deque[tuple[int, float]] = deque(maxlen=window)  # (step, seconds in training)
        self.start(0)

    def start(self, step: int) -> None:
        """Reset the meter at a step, and start with a warm-up."""
        self.steps_per_second: float | None = None
        self._readings.clear()
        self._warm_step = step + self.WARMUP_STEPS
        self._start_seconds = perf_counter()
        self._paused_seconds = 0.0
        self._pause_start: float | None = None

    @property
    def is_warming_up(self) -> bool:
        """Whether `read` must be called after each step: the first reading is taken at the end of the warm-up."""
        return not self._readings

    def read(self, step: int) -> float | None:
        """Take a reading, and return the steps per second over the last `window` readings; None until there are two."""
        if step > (self._readings[-1][0] if self._readings else self._warm_step - 1):
            self._readings.append((step, self._training_seconds()))
            (first_step, first_seconds), (_, seconds) = self._readings[0], self._readings[-1]
            if step > first_step:
                self.steps_per_second = (step - first_step) / (seconds - first_seconds)
        return self.steps_per_second

    def pause(self) -> None:
        """Stop the clock, for example for a validation; does nothing if it is stopped."""
        if self._pause_start is None:
            self._pause_start = perf_counter()

    def resume(self) -> None:
        """Start the clock again after a pause."""
        if self._pause_start is not None:
            self._paused_seconds += perf_counter() - self._pause_start
            self._pause_start = None

    def seconds_for(self, steps: float) -> float | None:
        """Return the expected wall time of so many more steps, with the same proportion of pauses as so far."""
        if self.steps_per_second is None:
            return None
        training_seconds = self._training_seconds()
        return steps / self.steps_per_second * (1 + self._paused_seconds / training_seconds)

    def _training_seconds(self) -> float:
        now = perf_counter() if self._pause_start is None else self._pause_start
        return now - self._start_seconds - self._paused_seconds


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of tensors on a CUDA device; for other devices, of the process on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    units_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * units_bytes


class GradNorm(Callback):
    """Callback that logs `grad_norm` at each logged step: the L2 norm over the optimizer's parameters, before clipping.

    It is the norm of the complete gradient, without the loss scale of 16-mixed. Strategies that don't expose gradients
    as tensors, DeepSpeed's and Lightning's FSDPStrategy, only get a warning.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_exposed = not isinstance(trainer.strategy, DeepSpeedStrategy | FSDPStrategy)
        if not self._is_exposed and trainer.is_global_zero:
            name = type(trainer.strategy).__name__
            log.warning("grad_norm is not logged under %s, which does not expose whole gradients", name)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not self._is_exposed or not trainer._logger_connector.should_update_logs:
            return
        norm = gradient_norm(p for group in optimizer.param_groups for p in group["params"]).item()
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            norm /= float(scaler.get_scale())  # a fused optimizer divides by the loss scale only in its step
        for logger in trainer.loggers:
            logger.log_metrics({"grad_norm": norm}, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


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
