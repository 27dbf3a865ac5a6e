"""32 bits are 32 bits unless another precision is asked for."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch

from tests.engine.conftest import PLAIN, Train

SHORT = (*PLAIN, "strategy=single", "trainer.max_steps=1", "trainer.val_check_interval=1")
SHORT += ("callbacks.seen._target_=tests.engine.strategies.test_matmul.Seen",)


class Seen(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        print("products in", torch.get_float32_matmul_precision())


@pytest.mark.nightly
def test_products_of_matrices_are_computed_as_asked(train: Train) -> None:
    cpu = "trainer.accelerator=cpu"
    assert "products in highest" in train(*SHORT, cpu).out
    assert "products in high\n" in train(*SHORT, cpu, "matmul_precision=high").out
