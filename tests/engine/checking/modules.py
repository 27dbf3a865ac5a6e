"""Modules that break a promise, as they stand in public code, one that keeps all, and a check without runs around it.

The short runs of that check are fits on the ranks of the pool, with the probe of a check.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightswitch.batches.plan import BatchPlan
from lightswitch.checking.check import Check, Way
from lightswitch.checking.probe import Probe
from lightswitch.checking.runs import ShortRun
from lightswitch.checkpoints.last import LastCheckpoints
from tests.engine.fits import Fit
from tests.engine.plain import PlainData
from tests.pool import Pool

Batch = tuple[Tensor, Tensor, Tensor]


class Good(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 4))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch[0]), batch[1])

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(logits, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Normed(Good):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))


class Dice(Good):
    """Divides sums over the batch (V-Net, Milletari et al. 2016)."""

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        found, target = logits.softmax(1), nn.functional.one_hot(y, 4).float()
        return 1 - (2 * (found * target).sum(0) / (found + target).sum(0)).mean()


class Noisy(Good):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, nn.Dropout(0.5))


class ScaledByRank(Good):
    """Writes into a weight in a hook, from what its own rank has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.zeros(4), requires_grad=False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        self.seen = logits.detach().mean(0)
        return self.loss(logits - self.center, batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.center.lerp_(self.seen, 0.5)


class Queued(Good):
    """Feeds a queue with its own samples (MoCo), which the next steps compare with."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(24, 2))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(self.net(batch[0] + self.queue.mean(0)), batch[1])
        self.queue = torch.cat([batch[0], self.queue])[:24]
        return loss


class Unseeded(Good):
    def __init__(self) -> None:
        super().__init__()
        generator = np.random.default_rng()  # in a closure, where the engine does not look for one to seed
        self.draw = lambda shape: generator.normal(size=shape)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        noise = torch.as_tensor(self.draw(batch[0].shape), dtype=torch.float32)
        return self.loss(self.net(batch[0] + noise), batch[1])


class Replaying(Good):
    """Trains on what it has seen before, kept in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.seen.append(batch[0].mean(0))
        return self.loss(self.net(batch[0] + torch.stack(self.seen).mean(0)), batch[1])


class Raises(Good):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        raise ValueError("the step of the user's own")


STEPS, GLOBAL_BATCH = 4, 24


class TrainingData(PlainData):
    val_dataloader = pl.LightningDataModule.val_dataloader  # as where there is none


def check_of(pool: Pool, folder: Path, module: Callable[[], pl.LightningModule]) -> Check:
    """A check of a module, whose killed runs end by themselves."""
    data = partial(TrainingData, samples=GLOBAL_BATCH * STEPS)
    fit = Fit(module, data, global_batch=GLOBAL_BATCH, steps=STEPS, arguments="gradient_clip_val=null")

    def start(folder: Path, words: Sequence[str]) -> ShortRun:
        typed = dict(word.split("=", 1) for word in words)
        micro_batch = int(typed["micro_batch_size"]) if "micro_batch_size" in typed else None
        of_run = replace(fit, strategy=typed["strategy"], micro_batch=micro_batch)
        resume = Path(typed["resume"].strip("'")) if "resume" in typed else None
        nudge = float(typed.get("callbacks.check_probe.nudge", 0))
        pool(int(typed["trainer.devices"]))(_fit, of_run, folder, resume, nudge)
        return ShortRun(0, "", folder)

    return Check(start, folder, (), STEPS, lambda ranks: BatchPlan.derive(GLOBAL_BATCH, None, ranks).micro_batch)


def way(strategy: str) -> Way:
    return Way(strategy, (f"strategy={strategy}",), 2)


def _fit(fit: Fit, folder: Path, resume: Path | None, nudge: float) -> None:
    pl.seed_everything(42, workers=True, verbose=False)
    saves = LastCheckpoints(str(folder / "run/checkpoints"), every_n_steps=STEPS // 2, keep=9)
    half = folder / f"run/checkpoints/step_{STEPS // 2}.ckpt"
    trainer = fit.trainer(Probe(str(folder), STEPS, nudge=nudge), saves)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")  # Lightning's guess
        trainer.fit(fit.module(), fit.data(), ckpt_path=resume, weights_only=True)
    if dist.is_initialized():
        dist.barrier()  # rank 0 serves the store that others read at the end of a save
    if trainer.is_global_zero and folder.name == "killed":  # as it would have been left
        (folder / "run/checkpoints/last.ckpt").unlink()
        (folder / "run/checkpoints/last.ckpt").symlink_to(half.name)
