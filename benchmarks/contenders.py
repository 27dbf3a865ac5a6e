"""The same steps in a loop of plain PyTorch, in train.py's Trainer and in a Trainer as tutorials set one up."""

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
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from lightswitch.launch import build, preflight, resolvers
from lightswitch.launch.arguments import normalised

CONF = Path(__file__).parents[1] / "conf"
WARMUP_STEPS = 20
CHECKPOINT_STEPS = 250
LOG_STEPS = 50  # Lightning's own default
CLIP_NORM = 1.0


def raw_seconds(model: LightningModule, data: LightningDataModule, loss: Callable[[Any], Tensor], steps: int) -> float:
    """CPU seconds a step of a loop that does nothing but train."""
    data.setup("fit")
    optimizer, schedule = _unpacked(model.configure_optimizers())
    start = 0.0
    for step, batch in enumerate(_endless(data.train_dataloader())):
        if step == WARMUP_STEPS:
            start = time.process_time()
        if step == WARMUP_STEPS + steps:
            break
        value = loss(batch)
        optimizer.zero_grad()  # where Lightning does it: memory is then used again in the same order
        value.backward()
        clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return (time.process_time() - start) / steps


def engine_seconds(overrides: list[str], folder: Path, steps: int) -> float:
    """CPU seconds a step of `python train.py`, with all that is on by default."""
    with composed(overrides, folder, steps) as cfg:
        model, data, trainer = build.build(cfg, preflight.check(cfg))
        return _fit_seconds(trainer, model, data, steps)


def peer_seconds(model: LightningModule, data: LightningDataModule, folder: Path, steps: int) -> float:
    """CPU seconds a step of a plain Trainer with TensorBoard, bar and checkpoints."""
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=WARMUP_STEPS + steps + 1,
        limit_val_batches=0,
        gradient_clip_val=CLIP_NORM,
        log_every_n_steps=LOG_STEPS,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=CHECKPOINT_STEPS, save_last=True)],
        logger=TensorBoardLogger(folder),
    )
    return _fit_seconds(trainer, model, data, steps)


@contextlib.contextmanager
def composed(overrides: list[str], folder: Path, steps: int) -> Iterator[DictConfig]:
    """A run's config, without the process that a run is."""
    resolvers.register()
    common = [
        f"hydra.run.dir={folder}",
        f"trainer.max_steps={WARMUP_STEPS + steps + 1}",
        "trainer.limit_val_batches=0",  # a step's time is asked for
        "trainer.accelerator=cpu",
        f"callbacks.last_checkpoint.every_n_steps={CHECKPOINT_STEPS}",
        f"trainer.gradient_clip_val={CLIP_NORM}",
    ]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        whole = compose("config", normalised([*common, *overrides]), return_hydra_config=True)
        whole.hydra.runtime.output_dir = str(folder)
        HydraConfig.instance().set_config(whole)
        yield OmegaConf.masked_copy(whole, [key for key in whole if key != "hydra"])


class Stopwatch(Callback):
    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.start = self.end = 0.0

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == WARMUP_STEPS:
            self.start = time.process_time()
        if trainer.global_step == WARMUP_STEPS + self.steps:
            self.end = time.process_time()


class Terminal(io.StringIO):
    """So that the bars are drawn, as for a person who looks on."""

    def isatty(self) -> bool:
        return True


def _fit_seconds(trainer: Trainer, model: LightningModule, data: LightningDataModule | None, steps: int) -> float:
    watch = Stopwatch(steps)
    trainer.callbacks.append(watch)  # type: ignore[attr-defined]
    terminal = Terminal()
    with contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal):
        trainer.fit(model, datamodule=data)
    return (watch.end - watch.start) / steps


def _unpacked(configured: Any) -> tuple[torch.optim.Optimizer, Any]:
    """What `configure_optimizers` returned: an optimizer, perhaps with a schedule that advances each step."""
    if isinstance(configured, dict):
        return configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    return configured, None


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader
