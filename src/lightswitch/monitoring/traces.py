"""Traces of some steps: what each rank computes and when, and what each allocation of a GPU's memory was for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import profile

from lightswitch.errors import Refused
from lightswitch.monitoring.step_results import batches

_ALLOCATIONS = 100_000  # the newest, of which a snapshot has the stack


class Trace(Callback):
    """Callback that writes `trace/rank_0.json.gz` into the run directory, which https://ui.perfetto.dev opens.

    A process can have only one torch profiler at a time, so `compare=true` measures its steps before.

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

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
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

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
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
