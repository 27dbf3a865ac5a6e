"""The checkpoints that a run goes on from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from lightswitch.checkpoints import directory


class LastCheckpoints(Checkpoint):
    """Writes ``folder``/step_<n>.ckpt every so many optimizer steps and at the end of training.

    ``folder``/last.ckpt is a link to the newest that is whole. Lightning's `save_last` follows the last *best* one, and
    nothing of it is written at the end of a run whose length is no multiple of its interval.

    Args:
        every_n_steps: between two of them.
        keep: how many of them stay, the newest; an older one goes when a new one is good.
        keep_every_n_steps: those at multiples of it stay for ever.
    """

    def __init__(self, folder: str, every_n_steps: int, keep: int = 2, keep_every_n_steps: int | None = None) -> None:
        counts = {"every_n_steps": every_n_steps, "keep": keep, "keep_every_n_steps": keep_every_n_steps or 1}
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name} is {count}; it is at least 1")
        self.folder = Path(folder)
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.keep_every_n_steps = keep_every_n_steps
        self._saved_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step // self.every_n_steps > self._saved_step // self.every_n_steps:
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Unless it has been at this step."""
        dry = getattr(trainer, "fast_dev_run", False)  # set past Lightning's own declaration
        if dry or trainer.global_step == self._saved_step:
            return
        self._saved_step = trainer.global_step
        path = self.folder / f"step_{trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            # a strategy from elsewhere has written it by now
            once_saved: Callable[[Callable[[], None]], None] = getattr(trainer.strategy, "once_saved", _now)
            once_saved(lambda: self._point_to(path))

    def _point_to(self, path: Path) -> None:
        beside = self.folder / "last.ckpt.partial"
        beside.unlink(missing_ok=True)
        beside.symlink_to(path.name)
        os.replace(beside, self.folder / "last.ckpt")
        for old in self._outdated(_step(path)):
            directory.remove(old)

    def _outdated(self, newest_step: int) -> list[Path]:
        """Also those of the run before it was started again; not those ahead of a run that was started anew."""
        older = sorted((path for path in self.folder.glob("step_*.ckpt") if _step(path) <= newest_step), key=_step)
        return [path for path in older[: -self.keep] if _step(path) % (self.keep_every_n_steps or newest_step + 1)]


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def _now(action: Callable[[], None]) -> None:
    action()
