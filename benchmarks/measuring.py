"""Time and memory of a run of train.py, measured from within the run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightswitch.monitoring.throughput import peak_bytes


class Measuring(Callback):
    """Callback that writes `measured_<rank>.json`: seconds to the first step, per step and per save, and peak bytes.

    The device is synchronised only where a measurement begins or ends. A save lasts from the end of its step until the
    next batch begins.

    Args:
        folder: where to write.
        began: when the process was started, in seconds since 1970.
        warm_up_steps: optimizer steps before those that are measured.
        steps: optimizer steps that are measured; the run saves at each multiple of warm_up_steps + steps.
    """

    def __init__(self, folder: str, began: float, warm_up_steps: int, steps: int) -> None:
        self.folder = Path(folder)
        self.began = began
        self.warm_up_steps, self.end_step = warm_up_steps, warm_up_steps + steps
        self.found: dict[str, Any] = {"save_seconds": []}
        self._step = 0
        self._measures_since = self._saves_since = 0.0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:  # a micro-batch that is not the last of its step
            return
        self._step = step = trainer.global_step
        if step == 1:
            self._now(trainer)
            self.found["first_step_seconds"] = time.time() - self.began
        if step == self.warm_up_steps:
            self._measures_since = self._now(trainer)
        if step == self.end_step:
            self.found["step_seconds"] = (self._now(trainer) - self._measures_since) / (step - self.warm_up_steps)
        if step % self.end_step == 0:
            self._saves_since = self._now(trainer)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if self._saves_since:
            self.found["save_seconds"].append(time.perf_counter() - self._saves_since)
            self._saves_since = 0.0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.found["peak_bytes"] = peak_bytes(trainer.strategy.root_device)
        path = self.folder / f"measured_{trainer.global_rank}.json"
        path.write_text(json.dumps(self.found))

    def _now(self, trainer: Trainer) -> float:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
