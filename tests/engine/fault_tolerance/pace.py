"""A run that lasts long enough to be interrupted."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

PACE_TARGET = "callbacks.pace._target_=tests.engine.fault_tolerance.pace.Pace"
FAILS_ONCE = "callbacks.fails._target_=tests.engine.fault_tolerance.pace.FailsOnce"


class Pace(pl.Callback):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        time.sleep(self.seconds)

    def on_validation_batch_start(self, *_: Any) -> None:
        time.sleep(self.seconds)


class InBackground(pl.Callback):
    """What a shell does to a command that it is given with an ampersand."""

    def on_train_start(self, *_: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


class FailsOnce(pl.Callback):
    """An error that has gone when the run is started again."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if trainer.global_step == self.step and not Path("failed").exists():
            Path("failed").touch()
            raise RuntimeError("a passing fault")


class AsksOnce(pl.Callback):
    """Asks the run to end at the end of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not Path("asked").exists():
            Path("asked").touch()
            os.kill(os.getpid(), signal.SIGTERM)


class AsksRank(pl.Callback):
    """Asks one rank alone to end, before it trains."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)
