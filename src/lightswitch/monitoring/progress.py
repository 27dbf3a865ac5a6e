"""Progress of a run: a single updating line on a terminal, a few plain lines in a log."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Container, Mapping
from contextlib import ExitStack, redirect_stdout
from shutil import get_terminal_size
from threading import RLock
from time import perf_counter
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile
from tqdm.contrib.logging import logging_redirect_tqdm

from lightswitch.monitoring.display import clock, compact, leave_terminal
from lightswitch.monitoring.metrics import batches
from lightswitch.monitoring.throughput import Meter

log = logging.getLogger(__name__)

tqdm.monitor_interval = 0  # no thread beside training
tqdm.set_lock(RLock())  # not its lock of processes, which a loader worker that is killed may hold

REDRAW_SECONDS = 0.5
LOG_LINES_A_RUN = 10
LOG_SECONDS = 300
LOG_EVALUATION_SECONDS = 30


class Progress(ProgressBar):
    """Progress bar of optimizer steps over the whole run, with loss, speed and time left, on rank 0.

    If stdout is not a terminal, it logs a line after each tenth of the run or five minutes, and one after each
    validation. Under manual optimization, it counts batches, or optimizer steps if `max_steps` is set, and also shows
    the other number.

    Args:
        samples_per_step: the global batch size.
        tokens_per_sample: length of a sample in tokens; if given, the speed is in tokens per second, else in samples.
    """

    def __init__(self, samples_per_step: int, tokens_per_sample: int | None = None) -> None:
        super().__init__()
        self._unit = "samples" if tokens_per_sample is None else "tokens"
        self._units_per_sample = tokens_per_sample or 1
        self._units_per_step = samples_per_step * self._units_per_sample
        self.is_enabled = True  # `LightningModule.print` reads it
        self._bar: tqdm[Any] | None = None  # on a terminal
        self._terminal = ExitStack()
        self._meter = Meter(window=150)  # 30 s of redraws, or 150 steps if a step takes longer than a redraw
        self._unit_of_progress = "step"
        self._total: int | None = None
        self._shown = 0
        self._next = self._next_seconds = math.inf
        self._validation: dict[str, float] = {}
        self._evaluated_batches = 0

    def enable(self) -> None:
        self.is_enabled = True

    def disable(self) -> None:
        self.is_enabled = False

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        tqdm.write(sep.join(map(str, args)), **kwargs)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open()
        by_batches = not pl_module.automatic_optimization and trainer.max_steps == -1
        self._unit_of_progress = "batch" if by_batches else "step"
        self._total = _total(trainer)
        self._meter.start(batches(trainer))
        self._schedule(self._done(trainer))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._meter.resume()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if not self.is_enabled:
            return
        if self._meter.is_warming_up:
            self._meter.read(batches(trainer))
        done = self._done(trainer)
        due = done >= self._next or perf_counter() >= self._next_seconds
        if due and done != self._shown:  # a step of several micro-batches is shown once it is complete
            self._show_training(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._meter.pause()  # until the next batch starts

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_enabled and (self._bar is not None or self._done(trainer) != self._shown):
            self._show_training(trainer)
        self._close()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meter.pause()
        self.on_test_start(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.is_enabled or trainer.sanity_checking:
            return
        if trainer.state.fn != TrainerFn.FITTING:
            self._close(leaves=False)
            return
        metrics = trainer.callback_metrics
        self._validation = {name: float(metrics[name]) for name in metrics if name.startswith("val")}
        if self._bar is not None:
            self._show_training(trainer)
        elif self._validation:
            values = "".join(f" · {name} {_short(value)}" for name, value in self._validation.items())
            log.info("%s %s%s", self._unit_of_progress, _of_total(self._done(trainer), self._total), values)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open()
        self._evaluated_batches = 0
        self._next_seconds = perf_counter() + (LOG_EVALUATION_SECONDS if self._bar is None else REDRAW_SECONDS)

    def on_test_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self._evaluated_batches += 1
        if not self.is_enabled or perf_counter() < self._next_seconds or trainer.sanity_checking:
            return
        stage = trainer.state.stage
        assert stage is not None
        batches = sum(getattr(trainer, f"num_{stage.dataloader_prefix}_batches"))
        total = int(batches) if batches < math.inf else None
        if self._bar is None:
            log.info("%s %s", stage.value, _of_total(self._evaluated_batches, total))
        else:
            self._draw(stage.value, self._evaluated_batches, total, "")
        self._next_seconds = perf_counter() + (LOG_EVALUATION_SECONDS if self._bar is None else REDRAW_SECONDS)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close(leaves=False)

    on_predict_start, on_predict_end = on_test_start, on_test_end
    on_validation_batch_end = on_predict_batch_end = on_test_batch_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _open(self) -> None:
        if self._bar is None and self.is_enabled and sys.stdout.isatty():
            self._bar = tqdm(file=sys.stdout, bar_format=" ", nrows=2)
            # what is logged or printed meanwhile appears above the bar
            self._terminal.enter_context(logging_redirect_tqdm())
            self._terminal.enter_context(redirect_stdout(DummyTqdmFile(sys.stdout)))

    def _close(self, leaves: bool = True) -> None:
        if self._bar is not None:
            self._bar.leave = leaves
            self._bar.close()
            self._bar = None
            self._terminal.close()

    def _draw(self, label: str, done: int, total: int | None, status: str) -> None:
        assert self._bar is not None
        form = "{n_fmt}" if total is None else "{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt}"
        self._bar.bar_format = f"{label} {form}" + status.replace("{", "{{").replace("}", "}}")
        self._bar.n, self._bar.total = done, total
        self._bar.ncols = get_terminal_size().columns - 1  # some terminals wrap at the last column
        try:
            self._bar.refresh()
        except OSError:
            leave_terminal()

    def _done(self, trainer: Trainer) -> int:
        return batches(trainer) if self._unit_of_progress == "batch" else trainer.global_step

    def _schedule(self, done: int) -> None:
        """Set the step and the time at which progress is shown next; the earlier counts."""
        self._shown = done
        self._next_seconds = perf_counter() + (LOG_SECONDS if self._bar is None else REDRAW_SECONDS)
        if self._bar is None and self._total is not None:
            stride = math.ceil(self._total / LOG_LINES_A_RUN)
            self._next = min((done // stride + 1) * stride, self._total)

    def _show_training(self, trainer: Trainer) -> None:
        done = self._done(trainer)
        status = "".join(f" · {part}" for part in self._status(trainer, done))
        if self._bar is None:
            log.info("%s %s%s", self._unit_of_progress, _of_total(done, self._total), status)
        else:
            self._draw("train", done, self._total, status)
        self._schedule(done)

    def _status(self, trainer: Trainer, done: int) -> list[str]:
        metrics, trained = trainer.progress_bar_metrics, batches(trainer)
        parts = []
        if not trainer.lightning_module.automatic_optimization:
            parts.append(f"step {trainer.global_step}" if self._unit_of_progress == "batch" else f"batch {trained}")
        shown: set[str] = set() if self._bar is not None else {*self._validation}  # a log has a line for these
        if (loss := _loss(metrics, "train")) is not None:
            parts.append(f"loss {_short(loss)}")
            shown |= {"train/loss", "train_loss", "loss"}  # names by which the module may log it
        if self._bar is not None and (loss := _loss(self._validation, "val")) is not None:
            parts.append(f"val {_short(loss)}")
            shown |= {"val/loss", "val_loss"}
        parts += [f"{name} {_short(value)}" for name, value in _asked_for(metrics, shown)]
        if (batches_per_second := self._meter.read(trained)) is not None:
            parts.append(f"{compact(batches_per_second * self._units_per_step)} {self._unit}/s")
        if self._total is not None:
            seconds = self._meter.seconds_for((self._total - done) * trained / max(1, done))
            parts += [] if seconds is None else [f"{clock(seconds)} left"]
        return parts


def _total(trainer: Trainer) -> int | None:
    if not trainer.lightning_module.automatic_optimization and trainer.max_steps != -1:
        return trainer.max_steps  # Lightning estimates the smaller of this and the batches
    total = trainer.estimated_stepping_batches  # inf or -1 if neither epochs nor steps limit the run
    return int(total) if 0 < total < math.inf else None


def _loss(metrics: Mapping[str, Any], stage: str) -> float | None:
    value = metrics.get(f"{stage}/loss", metrics.get(f"{stage}_loss"))
    return None if value is None else float(value)


def _asked_for(metrics: Mapping[str, Any], shown: Container[str]) -> list[tuple[str, float]]:
    """Return metrics logged with `prog_bar=True` and not shown otherwise, with values by step rather than by epoch."""
    named = ((name.removesuffix("_step"), float(metrics[name])) for name in metrics if not name.endswith("_epoch"))
    return [(name, value) for name, value in named if name not in shown]


def _of_total(done: int, total: int | None) -> str:
    return f"{done}" if total is None else f"{done}/{total}"


def _short(value: float) -> str:
    return f"{value:#.3g}".rstrip(".")
