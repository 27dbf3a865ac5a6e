"""Every process group of a run has the time-out of its strategy: the watchdog is to speak before torch does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from lightswitch.deepspeed.strategy import DeepSpeed
from lightswitch.strategies.sharded import set_timeouts, timeouts
from tests.engine.fits import LANGUAGE, PLAIN, TENSOR_PARALLEL, Fits


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=900))
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_a_group_without_a_time_out_of_its_own_gets_the_runs() -> None:
    by_default, by_choice = dist.new_group([0]), dist.new_group([0], timeout=timedelta(seconds=7))
    set_timeouts(timedelta(seconds=900))
    assert set(timeouts(by_default)) == {timedelta(seconds=900)}
    assert set(timeouts(by_choice)) == {timedelta(seconds=7)}


class Timed(pl.Callback):
    """Stores the time-outs of the process groups in a metric that no other callback has: seconds, by group."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        found = [seconds for group in _world.pg_map for seconds in timeouts(group)]
        trainer.logger.log_metrics({f"timeout_{n}": one.total_seconds() for n, one in enumerate(found)})


FITS = {  # and at least how many groups it has
    "ddp": (replace(PLAIN, strategy="ddp timeout_seconds=900"), 1),
    "fsdp_tp": (replace(LANGUAGE, strategy=f"{TENSOR_PARALLEL} timeout_seconds=900"), 2),
    "fsdp_hybrid": (replace(PLAIN, strategy="fsdp_hybrid shard_size=1 timeout_seconds=900"), 2),
    "DeepSpeed": (replace(PLAIN, strategy=partial(DeepSpeed, stage=2, timeout=timedelta(seconds=900))), 2),
}


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", FITS)
def test_a_strategys_groups_have_its_time_out(strategy: str, fits: Fits) -> None:
    fit, groups = FITS[strategy]
    run = fits(replace(fit, steps=1, callbacks=(Timed,)), 2)[0]
    found = [values[0] for name, values in run.columns.items() if name.startswith("timeout_")]
    assert len(found) >= groups
    assert set(found) == {900}
