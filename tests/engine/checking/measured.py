"""What a check measures, without runs around it: fits on the ranks of the pool, with the probe of a check."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightswitch.checking.causes import Evidence
from lightswitch.checking.check import SINGLE
from lightswitch.checking.comparison import EPS_32, Comparison, States, states
from lightswitch.checking.probe import Probe, read
from lightswitch.checking.runs import Ended, Measured
from lightswitch.checkpoints.last import LastCheckpoints
from tests.engine.fits import Fit
from tests.engine.plain import PlainData
from tests.pool import Pool

STEPS = 4


@dataclass(frozen=True)
class Trial:
    """One process and a way, as a check measures them."""

    one: Measured
    comparison: Comparison
    evidence: Evidence
    whole: States


class TrainingData(PlainData):
    val_dataloader = pl.LightningDataModule.val_dataloader  # as where there is none


def trial(pool: Pool, folder: Path, module: Callable[[], pl.LightningModule], strategy: str = "ddp") -> Trial:
    """Measure a module in one process, whole, once more, resumed, nudged and cut, and under a strategy."""
    data = partial(TrainingData, samples=24 * STEPS)
    fit = Fit(module, data, global_batch=24, micro_batch=None, steps=STEPS, arguments="gradient_clip_val=null")
    (moments,) = pool(1)(_in_one_process, fit, folder)
    (way, _) = pool(2)(_fit, replace(fit, strategy=strategy), folder / strategy)
    found = {name: states(one) for name, one in moments.items()}
    one = Measured(SINGLE, *(_ended(moments[name]) for name in ("whole", "killed", "resumed")))
    names = moments["whole"][0]["parameters"]
    comparison = Comparison(found["whole"], lambda: found["killed"], lambda: found["nudged"], names, EPS_32)
    return Trial(one, comparison, Evidence(moments["whole"], moments["cut"], way), states(way))


def _in_one_process(fit: Fit, folder: Path) -> Mapping[str, list[dict[str, Any]]]:
    saved = folder / "killed" / "saved"
    cut = replace(fit, micro_batch=12) if fit.module().automatic_optimization else fit
    return {
        "whole": _fit(fit, folder / "whole"),
        "nudged": _fit(fit, folder / "nudged", nudge=8 * EPS_32),
        "cut": _fit(cut, folder / "cut"),
        "killed": _fit(fit, folder / "killed", saved=saved),
        "resumed": _fit(fit, folder / "resumed", resumed=saved / f"step_{STEPS // 2}.ckpt"),
    }


def _fit(
    fit: Fit, folder: Path, saved: Path | None = None, resumed: Path | None = None, **probe: Any
) -> list[dict[str, Any]]:
    pl.seed_everything(42, workers=True, verbose=False)
    probe_callback = Probe(str(folder), STEPS, every_moment=True, **probe)
    saves = [] if saved is None else [LastCheckpoints(str(saved), every_n_steps=STEPS // 2, keep=9)]
    trainer = fit.trainer(probe_callback, *saves)
    checkpoint = resumed if resumed and resumed.exists() else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")  # Lightning's guess
        trainer.fit(fit.module(), fit.data(), ckpt_path=checkpoint, weights_only=True)
    return read(folder)


def _ended(moments: list[dict[str, Any]]) -> Ended:
    return Ended(0, moments, "", Path())
