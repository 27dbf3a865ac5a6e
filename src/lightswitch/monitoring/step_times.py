"""Where the time and the memory of a step go: the times of its phases, a trace, and the allocations of a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from torch.profiler import profile

from lightswitch.errors import Refused
from lightswitch.hooked_strategy import HookedStrategy
from lightswitch.monitoring.metrics import batches, is_counted

PHASES = ("data", "forward_backward", "optimizer", "rest")
_ALLOCATIONS = 100_000  # the newest, of which a snapshot has the stack


class StepTimes(Callback):
    """Callback that logs at each logged step how long its phases took on rank 0, in seconds: `time/data` and so on.

    Data is from the end of a batch to the start of the next, without validation and saving; rest is what hooks do
    after the optimizer's step; under manual optimization, forward_backward includes what follows it. On GPUs, the
    logged steps wait for the device at the end of each phase.
    """

    def __init__(self) -> None:
        self._begin()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin()
        after = "rest" if pl_module.automatic_optimization else "forward_backward"  # which may step several times
        HookedStrategy.of(trainer).on_step = lambda: self._enter(after, trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._enter("forward_backward", trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._enter("optimizer", trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        is_logged = is_counted(trainer)  # until the step is complete, and in its last batch
        self._enter("data", trainer)
        if trainer.fit_loop._should_accumulate():
            return
        if is_logged:
            times = {f"time/{phase}": seconds for phase, seconds in self._seconds.items() if phase}
            for logger in trainer.loggers:
                logger.log_metrics(times, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        self._begin()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._enter("", trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._enter("data", trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._enter("", trainer)  # until the next batch starts

    def _begin(self) -> None:
        self._seconds = dict.fromkeys((*PHASES, ""), 0.0)  # "" is none of a step's
        self._phase, self._since = "data", perf_counter()

    def _enter(self, phase: str, trainer: Trainer) -> None:
        """Count the time since the last call for the phase that ends."""
        waits = trainer.strategy.root_device.type == "cuda" and is_counted(trainer)
        if waits and self._phase != "data":
            torch.cuda.synchronize(trainer.strategy.root_device)
        self._seconds[self._phase] += perf_counter() - self._since
        if waits and self._phase == "data":  # what the step before has queued is no wait for data
            torch.cuda.synchronize(trainer.strategy.root_device)
        self._phase, self._since = phase, perf_counter()


class Trace(Callback):
    """Callback that writes `trace/rank_0.json.gz` into the run directory, which https://ui.perfetto.dev opens.

    Args:
        folder: the run directory.
        skip_steps: optimizer steps before the trace.
        steps: optimizer steps in the trace.
    """

    def __init__(self, folder: str, skip_steps: int = 20, steps: int = 3) -> None:
        if skip_steps < 0 or steps < 1:
            raise ValueError(f"skip_steps={skip_steps}, steps={steps}: skip 0 steps or more, and trace at least 1")
        self._folder = Path(folder, "trace")
        self._skip_steps, self._steps = skip_steps, steps
        self._profile: profile | None = None
        self._first = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first = trainer.global_step + self._skip_steps

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and self._profile is None and trainer.global_step == self._first:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch 2.13 would write a line to the terminal
            self._profile = profile()
            self._profile.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if batches(trainer) >= self._first + self._steps:
            self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._folder.mkdir(exist_ok=True)
            self._profile.export_chrome_trace(str(self._folder / "rank_0.json.gz"))
            self._profile, self._first = None, -1


class MemorySnapshot(Callback):
    """Callback that writes `memory/rank_N.pickle`, which https://pytorch.org/memory_viz shows: the allocations of the
    first steps with their stacks, or of those before memory ran out.

    Args:
        folder: the run directory.
        steps: optimizer steps after which it is written.

    Raises:
        Refused: the run is not on CUDA devices.
    """

    def __init__(self, folder: str, steps: int = 3) -> None:
        self._folder, self._steps = Path(folder, "memory"), steps

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.strategy.root_device.type != "cuda":
            raise Refused("memory_snapshot reads the allocator of CUDA, and this run is on a CPU; leave it out")
        if stage == "fit":
            torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if self._steps and batches(trainer) >= self._steps:
            self._write(trainer)
            self._steps = 0

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, torch.OutOfMemoryError):
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"rank_{trainer.global_rank}.pickle"
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]  # torch has no types for it
