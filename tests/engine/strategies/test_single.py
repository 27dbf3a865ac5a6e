"""One device: the strategy that is not distributed."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch

from lightswitch.strategies.single import Single


def test_single_is_one_process_on_the_cpu() -> None:
    trainer = pl.Trainer(strategy=Single(), accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert trainer.strategy.root_device == torch.device("cpu")
    assert (trainer.world_size, trainer.strategy.launcher) == (1, None)


@pytest.mark.gpu
def test_single_follows_the_accelerator() -> None:
    trainer = pl.Trainer(strategy=Single(), devices=1, logger=False, enable_checkpointing=False)
    assert trainer.strategy.root_device == torch.device("cuda:0")
