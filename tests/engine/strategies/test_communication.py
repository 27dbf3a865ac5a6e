"""How long a rank waits for another: the watchdog is to speak before torch does."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch.distributed.distributed_c10d import _world

from lightswitch.deepspeed.strategy import DeepSpeed
from tests.engine.fits import LANGUAGE, PLAIN, TENSOR_PARALLEL, Fits
from tests.night import at_night


class Timed(pl.Callback):
    """Stores the time-outs of the process groups in a metric that no other callback has: seconds, by group."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        backends = [group._get_backend(torch.device("cpu")) for group in _world.pg_map]
        found = [backend.options._timeout for backend in backends]
        trainer.logger.log_metrics({f"timeout_{n}": one.total_seconds() for n, one in enumerate(found)})


FITS = {  # and at least how many groups it has
    "ddp": (replace(PLAIN, strategy="ddp timeout_seconds=900"), 1),
    "fsdp_tp": (replace(LANGUAGE, strategy=f"{TENSOR_PARALLEL} timeout_seconds=900"), 2),
    "fsdp_hybrid": (replace(PLAIN, strategy="fsdp_hybrid shard_size=1 timeout_seconds=900"), 2),
    "DeepSpeed": (replace(PLAIN, strategy=partial(DeepSpeed, stage=2, timeout=timedelta(seconds=900))), 2),
}


@pytest.mark.parametrize("strategy", ["fsdp_hybrid", *at_night("ddp", "fsdp_tp", "DeepSpeed")])
def test_a_strategys_groups_have_its_time_out(strategy: str, fits: Fits) -> None:
    fit, groups = FITS[strategy]
    run = fits(replace(fit, steps=1, callbacks=(Timed,)), 2)[0]
    found = [values[0] for name, values in run.columns.items() if name.startswith("timeout_")]
    assert len(found) >= groups
    assert set(found) == {900}
