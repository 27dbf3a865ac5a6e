"""A run that lasts long enough to be interrupted."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

PACE_TARGET = "callbacks.pace._target_=tests.engine.failures.pace.Pace"
FAILS_ONCE = "callbacks.fails._target_=tests.engine.failures.pace.FailsOnce"


class Pace(pl.Callback):
    """
    Args:
        seconds: that each batch takes.
        until: a file, from which on it takes none: what is to happen in a run lets it go on, however long that takes.
    """

    def __init__(self, seconds: float, until: str | None = None) -> None:
        self.seconds, self.until = seconds, until and Path(until)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        Path("pacing").touch()
        self._wait()

    def on_validation_batch_start(self, *_: Any) -> None:
        self._wait()

    def _wait(self) -> None:
        if self.until is None:
            time.sleep(self.seconds)
            return
        end = time.monotonic() + self.seconds
        while not self.until.exists() and time.monotonic() < end:
            time.sleep(0.02)


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


class Asks(pl.Callback):
    """Asks the run to end, once.

    Args:
        when: the hook in which it does.
        step: the first in which it does.
        rank: the one that is asked.
        by: the signal.
    """

    def __init__(self, when: str, step: int = 0, rank: int = 0, by: str = "SIGTERM") -> None:
        self.when, self.step, self.rank, self.by = when, step, rank, signal.Signals[by]

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._perhaps_ask("on_fit_start", trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._perhaps_ask("on_train_batch_end", trainer)

    def _perhaps_ask(self, hook: str, trainer: pl.Trainer) -> None:
        is_time = (hook, trainer.global_rank) == (self.when, self.rank) and trainer.global_step >= self.step
        if is_time and not Path("asked").exists():
            Path("asked").touch()
            os.kill(os.getpid(), self.by)
