"""Ends a run as a power cut does, at a moment that nobody chose."""

from __future__ import annotations

import os
import random
import signal
import time
from threading import Timer
from typing import Any

import lightning.pytorch as pl


class Kill(pl.Callback):
    """SIGKILL within a few steps: between steps, in one, in a validation, while a checkpoint is written.

    Five steps are two saves of a run that saves every second one, and the second waits until the first is written.
    The run goes no further than three steps: on a busy machine, the moment may be late.
    """

    killed_from = 1 << 30

    def __init__(self, seed: int | str) -> None:
        self.moment = random.Random(seed)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.step = trainer.global_step + self.moment.randrange(5, 13)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        time.sleep(0.01)  # or a run would be over before a checkpoint is written
        while trainer.global_step >= self.killed_from + 3:
            time.sleep(1)
        if trainer.global_step >= self.step:
            self.step, self.killed_from = 1 << 30, trainer.global_step
            timer = Timer(self.moment.random() * 0.08, lambda: os.kill(os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
