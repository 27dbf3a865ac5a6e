"""A shape of module under a strategy, in a rank of the pool.

It is trained for a few steps and saved; a checkpoint of one process is resumed from and trained to the end; the last
checkpoint is read back and tested.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightswitch.checkpoints.last import LastCheckpoints
from tests.engine.fits import Curve, Fit
from tests.engine.strategies.shapes import modules

SAVED, END = 2, 4  # steps

Cell = dict[str, Any]


def ranks(strategy: str) -> int:
    return 1 if strategy == "single" else 2


def trained(strategy: str, shape: str, checkpoint: Path | None, folder: Path) -> Cell:
    """What came of a shape in this rank.

    Args:
        strategy: a file of conf/strategy, with options.
        checkpoint: to resume from; None to train without a break.
    """
    begun, resumed = Curve(), Curve()
    module = _module(shape, seed=1)
    data = modules.Sentences(getattr(module, "samples", 64))
    _trainer(strategy, folder, SAVED if checkpoint else END, begun).fit(module, data)
    module = _module(shape, seed=2)
    trainer = _trainer(strategy, folder, END, resumed)
    if checkpoint:
        trainer.fit(module, data, ckpt_path=checkpoint)
    trainer.test(module, data, ckpt_path=folder / f"checkpoints/step_{END}.ckpt", verbose=False)
    losses = [loss for curve in (begun, resumed) for loss in curve.columns["train/loss"].values()]
    (test,) = resumed.columns["test/loss"].values()
    return {"losses": losses, "test": test, "extra": module.get_extra_state() if shape == "Versioned" else None}


def _module(shape: str, seed: int) -> pl.LightningModule:
    pl.seed_everything(seed, workers=True, verbose=False)
    return getattr(modules, shape)()


def _trainer(strategy: str, folder: Path, steps: int, curve: Curve) -> pl.Trainer:
    arguments = f"gradient_clip_val=0.5 default_root_dir={folder}"
    fit = Fit(pl.LightningModule, pl.LightningDataModule, strategy, 8, 2, steps, arguments)
    return fit.trainer(LastCheckpoints(str(folder / "checkpoints"), every_n_steps=SAVED), logger=curve)
