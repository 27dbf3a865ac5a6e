"""A check without runs around it: its short runs are fits on the ranks of the pool, with the probe of a check."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch.distributed as dist

from lightswitch.batches.plan import BatchPlan
from lightswitch.checking.check import Check, Way
from lightswitch.checking.probe import Probe
from lightswitch.checking.runs import ShortRun
from lightswitch.checkpoints.last import LastCheckpoints
from tests.engine.fits import Fit
from tests.engine.plain import PlainData
from tests.pool import Pool

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
