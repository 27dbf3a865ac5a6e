"""What is imposed on the Trainer: a batch that is cut for as many devices as there are, and exact means."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightswitch.batches.callback import GlobalBatch
from lightswitch.batches.plan import BatchPlan
from lightswitch.errors import Refused
from tests.engine.fits import local_trainer
from tests.engine.plain import PlainData, PlainModel


def test_a_batch_that_was_cut_for_other_devices_is_refused(tmp_path: Path) -> None:
    batch = GlobalBatch(BatchPlan.derive(global_batch=8, micro_batch=None, replicas=4), seed=0)
    trainer = local_trainer(tmp_path, batch, max_steps=1)
    with pytest.raises(Refused, match="is split for 4 devices, but Single has 1 that read different samples"):
        trainer.fit(PlainModel(), PlainData())


def test_one_process_reduces_nothing_in_double_precision(tmp_path: Path) -> None:
    """Apple's GPUs have none."""
    batch = GlobalBatch(BatchPlan.derive(global_batch=8, micro_batch=None, replicas=1), seed=0)
    trainer = local_trainer(tmp_path, batch)
    trainer.strategy.connect(PlainModel())
    batch.setup(trainer, trainer.lightning_module, "fit")
    assert trainer.strategy.reduce(torch.tensor(3)).dtype == torch.int64
