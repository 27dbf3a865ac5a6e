"""The batch is cut for as many devices as there are."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest

from lightswitch.batches.callback import GlobalBatch
from lightswitch.batches.plan import BatchPlan
from lightswitch.errors import Refused
from lightswitch.strategies.single import Single
from tests.engine.plain import PlainData, PlainModel


def test_a_batch_that_was_cut_for_other_devices_is_refused(tmp_path: Path) -> None:
    batch = GlobalBatch(BatchPlan.derive(global_batch=8, micro_batch=None, replicas=4), seed=0)
    trainer = pl.Trainer(
        strategy=Single(),
        accelerator="cpu",
        callbacks=[batch],
        default_root_dir=tmp_path,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
    )
    with pytest.raises(Refused, match="is cut for 4 devices, and Single has 1 that read different samples"):
        trainer.fit(PlainModel(), PlainData())
