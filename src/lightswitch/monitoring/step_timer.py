"""Measurement of a training step's phases with torch's profiler, and a Lightning profiler that does nothing."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler, PyTorchProfiler
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function

from lightswitch.hooked_strategy import HookedStrategy, of_ranks
from lightswitch.monitoring import step_times
from lightswitch.monitoring.step_times import PHASES, Interval, StepTimes
from lightswitch.monitoring.throughput import peak_bytes

log = logging.getLogger(__name__)
_MARK = "lightswitch: "
# On CPUs, the process group's events show when a collective runs; on GPUs, the kernels of NCCL and RCCL do.
_COLLECTIVE_ON_CPU, _COLLECTIVE_ON_GPU = re.compile(r"(gloo|mpi|ucc|ccl|xccl):"), re.compile(r"(?i).*nccl")
# Namespaced events without computation: calls that only start collectives, or wait in them
_NO_COMPUTATION = re.compile(r"(c10d|_c10d_functional|autograd|torch|FSDP|nccl)::|[\w/]*::barrier")
_NOTHING = nullcontext()


class StepTimer(Callback):
    """Callback that measures a few steps with torch's profiler, and writes step_times.json into the run directory.

    A phase lasts from one of Lightning's hooks to the next: data (from the end of a batch to the start of the next:
    reading it and moving it to the device), forward, backward, optimizer (with clipping), and the rest. Communication
    is a separate phase: it is the time in which a rank communicates, or waits for a slower rank, without computing at
    the same time. On GPUs, each measured phase is synchronized.

    Steps that are not measured are as fast as without the callback. Every rank must have the callback, and the
    Trainer's strategy must have the mixin `HookedStrategy`.

    Args:
        folder: the run directory.
        skip_steps: optimizer steps to skip before measuring, for warm-up.
        steps: optimizer steps to measure.

    Raises:
        ValueError: `skip_steps` is negative, or `steps` is less than 1.
    """

    def __init__(self, folder: str, skip_steps: int = 10, steps: int = 5) -> None:
        if skip_steps < 0 or steps < 1:
            raise ValueError(f"skip_steps={skip_steps}, steps={steps}: skip 0 steps or more, and measure at least 1")
        self._folder = Path(folder)
        self._first_step, self._last_step = skip_steps, skip_steps + steps
        self._process_start = psutil.Process().create_time()
        self._profile: profile | None = None
        self._startup_seconds = self._saving_seconds = self._overlapped_seconds = 0.0
        self._saving_since: float | None = None
        self._trained_steps = self._measured_steps = 0  # in this start
        self._seconds: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.profiler, PyTorchProfiler):  # type: ignore[attr-defined]  # set by a connector
            self._first_step = -1
            if trainer.is_global_zero:
                log.warning(
                    "steps are not measured: a process can have only one torch profiler, and trainer.profiler uses it"
                )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._startup_seconds = self._startup_seconds or time.time() - self._process_start
        if self._saving_since is not None:  # checkpoints are taken before the other hooks of a step
            self._saving_seconds += time.perf_counter() - self._saving_since
            self._saving_since = None
        if self._profile is None and self._trained_steps == self._first_step:
            self._start(trainer)
        elif self._profile is not None and self._trained_steps == self._last_step:
            self._stop(trainer)
            self._write(trainer)  # in case the run is stopped later
        self._mark("forward", trainer)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._mark("backward", trainer)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark("rest", trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._mark("optimizer", trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._trained_steps += not trainer.fit_loop._should_accumulate()  # also under manual optimization
        self._mark("data", trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._saving_since is None:
            self._saving_since = time.perf_counter()
            self._mark("saving", trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark("validation", trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark("data", trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._profile is not None:
            self._stop(trainer)
        self._write(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._profile is not None:  # the run has failed
            self._profile.stop()

    def _start(self, trainer: Trainer) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch 2.13 would write a line to the terminal
        HookedStrategy.of(trainer).on_step = lambda: self._mark("rest", trainer)
        device = [ProfilerActivity.CUDA] if trainer.strategy.root_device.type == "cuda" else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *device], acc_events=True)
        self._profile.start()

    def _stop(self, trainer: Trainer) -> None:
        assert self._profile is not None
        self._mark("end", trainer)
        self._profile.stop()
        events = self._profile.events()  # type: ignore[no-untyped-call]  # torch has no types for it
        self._profile, HookedStrategy.of(trainer).on_step = None, None
        self._measured_steps = self._trained_steps - self._first_step
        if self._measured_steps:
            self._seconds, self._overlapped_seconds = _split(events or [], trainer.strategy.root_device.type == "cuda")

    def _mark(self, phase: str, trainer: Trainer) -> None:
        if self._profile is None:
            return
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize(trainer.strategy.root_device)  # otherwise its time would count for a later phase
        with record_function(f"{_MARK}{phase}"):
            pass

    def _write(self, trainer: Trainer) -> None:
        """Write the means over the ranks to step_times.json on rank 0. Collective."""
        device, steps = trainer.strategy.root_device, max(1, self._measured_steps)
        own = [float(peak_bytes(device)), self._saving_seconds / max(1, self._trained_steps)]
        own += [one / steps for one in (self._overlapped_seconds, *self._seconds.values())]
        peaks, *columns = zip(*of_ranks(own), strict=True)
        saving, overlapped, *seconds = (sum(column) / len(column) for column in columns)
        is_too_short = not self._seconds and (self._folder / step_times.FILE).exists()
        if trainer.is_global_zero and not is_too_short:  # else, an earlier start has measured
            by_phase = dict(zip(PHASES, seconds, strict=False))
            found = (int(max(peaks)), self._trained_steps, saving, self._measured_steps, by_phase, overlapped)
            step_times.write(self._folder, StepTimes(self._startup_seconds, trainer.world_size, *found))


def _split(events: Iterable[FunctionEvent], on_gpu: bool) -> tuple[dict[str, float], float]:
    """Return the seconds of all measured steps by phase, and those of communication overlapping with computation."""
    marks: list[tuple[float, str]] = []
    communication: list[Interval] = []
    computation: list[Interval] = []
    for event in events:
        name, span = event.name, (event.time_range.start / 1e6, event.time_range.end / 1e6)
        is_on_gpu = event.device_type.name == "CUDA"  # also on ROCm
        if name.startswith(_MARK):
            if not is_on_gpu:  # the profiler repeats annotations on the device's timeline
                marks.append((span[0], name.removeprefix(_MARK)))
        elif is_on_gpu != on_gpu or (event.is_user_annotation and on_gpu):
            continue
        elif (_COLLECTIVE_ON_GPU if on_gpu else _COLLECTIVE_ON_CPU).match(name):
            communication.append(span)
        elif on_gpu or ("::" in name and not _NO_COMPUTATION.match(name)):
            computation.append(span)
    return step_times.split(sorted(marks), communication, computation)


class NoProfiler(PassThroughProfiler):
    """Profiler that does nothing, with less overhead than Lightning's PassThroughProfiler.

    Lightning enters a profiling context around each hook of each callback, about 70 per step, and its profiler creates
    a new context each time.
    """

    def profile(self, action_name: str) -> AbstractContextManager[None]:  # type: ignore[override]  # Lightning's is a generator
        return _NOTHING
