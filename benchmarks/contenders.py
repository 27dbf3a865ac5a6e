"""The same training steps in a plain PyTorch loop, in train.py's Trainer, and in a Trainer as tutorials configure
it."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer import call
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from lightswitch.cluster import placement
from lightswitch.config.overrides import normalised
from lightswitch.context import RunContext
from lightswitch.launch import build
from lightswitch.launch.hydra_entry import register_resolvers
from lightswitch.preflight.check import check
from lightswitch.process import Process, Signals

CONF = Path(__file__).parents[1] / "conf"
WARMUP_STEPS = 20
CHECKPOINT_STEPS = 250
LOG_STEPS = 50  # Lightning's default
CLIP_NORM = 1.0
_HOOKS = ("_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook")


def raw_steps(model: LightningModule, data: LightningDataModule, loss: Callable[[Any], Tensor]) -> Iterator[None]:
    """Train in a plain loop, and yield after each step."""
    data.setup("fit")
    optimizer, schedule = _unpacked(model.configure_optimizers())
    for batch in _endless(data.train_dataloader()):
        value = loss(batch)
        optimizer.zero_grad()  # at the same place as in Lightning, so that memory is reused in the same order
        value.backward()
        clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        yield


def with_engine(overrides: list[str], folder: Path, turns: Turns) -> None:
    """Train as `python train.py` does, with all of its defaults."""
    with composed(overrides, folder, turns.steps) as cfg, _hooks_restored():
        process = Process()
        hydra = HydraConfig.get()
        folder = Path(hydra.runtime.output_dir)
        run = RunContext(folder, str(cfg.run_id), "fit", placement.detect(), hydra, process, Signals(process))
        model, data, trainer = build.build(cfg, run, check(cfg, run))
        _fit(trainer, model, data, turns)


def with_peer(model: LightningModule, data: LightningDataModule, folder: Path, turns: Turns) -> None:
    """Train with a plain Trainer that has TensorBoard, a progress bar and checkpoints."""
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=turns.steps,
        limit_val_batches=0,
        gradient_clip_val=CLIP_NORM,
        log_every_n_steps=LOG_STEPS,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=CHECKPOINT_STEPS, save_last=True)],
        logger=TensorBoardLogger(folder),
    )
    _fit(trainer, model, data, turns)


@contextlib.contextmanager
def composed(overrides: list[str], folder: Path, steps: int) -> Iterator[DictConfig]:
    """Yield the config of a run, without starting a process for it."""
    register_resolvers(placement.detect())
    common = [
        f"hydra.run.dir={folder}",
        f"trainer.max_steps={steps}",
        "trainer.limit_val_batches=0",  # only steps are measured
        "trainer.accelerator=cpu",
        f"callbacks.last_checkpoint.every_n_steps={CHECKPOINT_STEPS}",
        f"trainer.gradient_clip_val={CLIP_NORM}",
    ]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        whole = compose("config", normalised([*common, *overrides]), return_hydra_config=True)
        whole.hydra.runtime.output_dir = str(folder)
        HydraConfig.instance().set_config(whole)
        yield OmegaConf.masked_copy(whole, [key for key in whole if key != "hydra"])


@contextlib.contextmanager
def _hooks_restored() -> Iterator[None]:
    """Restore Lightning's functions that call hooks, which the engine replaces in its process, for later contenders."""
    before = {name: getattr(call, name) for name in _HOOKS}
    try:
        yield
    finally:
        for name, own in before.items():
            setattr(call, name, own)


class Turns(Callback):
    """Callback that alternates a Trainer's steps with those of a plain loop: whatever slows the machine slows both.

    Afterwards, `seconds` and `raw_seconds` contain the time per step of each turn: CPU time, unless another clock is
    given.
    """

    def __init__(
        self, raw: Iterator[None], count: int, steps_each: int, clock: Callable[[], float] = time.process_time
    ) -> None:
        self.raw = raw
        self.steps_each = steps_each
        self.clock = clock
        self.steps = self.steps_of(count, steps_each)
        self.seconds: list[float] = []
        self.raw_seconds: list[float] = []
        self._began = 0.0

    @staticmethod
    def steps_of(count: int, steps_each: int) -> int:
        """Return the number of steps of the Trainer in `count` turns."""
        return WARMUP_STEPS + count * steps_each + 1  # the last one ends the last turn

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        turn, step = divmod(trainer.global_step - WARMUP_STEPS, self.steps_each)
        if turn < 0 or step:
            return
        now = self.clock()
        if turn:
            self.seconds.append((now - self._began) / self.steps_each)
        else:
            self._run_raw()  # to warm up, too
            now = self.clock()
        if len(self.raw_seconds) * self.steps_each < self.steps - WARMUP_STEPS - 1:
            self._run_raw()
            self.raw_seconds.append((self.clock() - now) / self.steps_each)
        self._began = self.clock()

    def _run_raw(self) -> None:
        for _ in range(self.steps_each):
            next(self.raw)


class Terminal(io.StringIO):
    """Stream that claims to be a terminal, so that progress bars are drawn as for a user."""

    def isatty(self) -> bool:
        return True


def _fit(trainer: Trainer, model: LightningModule, data: LightningDataModule | None, turns: Turns) -> None:
    trainer.callbacks.append(turns)
    terminal = Terminal()
    with contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal):
        trainer.fit(model, datamodule=data)


def _unpacked(configured: Any) -> tuple[torch.optim.Optimizer, Any]:
    """Return the optimizer, and the schedule if any, from the result of `configure_optimizers`."""
    if isinstance(configured, dict):
        return configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    return configured, None


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader
