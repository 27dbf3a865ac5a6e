"""Checkpoints without what a run never trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightswitch.checkpoints.finetuning import TrainableOnly
from lightswitch.checkpoints.last import LastCheckpoints
from lightswitch.checkpoints.reader import Reader
from tests.engine.fits import local_trainer


class FrozenAfterwards(pl.LightningModule):
    """Brings one layer, and trains another in its first step alone."""

    def __init__(self) -> None:
        super().__init__()
        self.brought, self.first, self.head = (nn.Linear(4, 4) for _ in range(3))
        self.brought.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.first.requires_grad_(self.global_step == 0)
        return self.head(self.first(self.brought(batch))).square().mean()

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(2, 4), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_what_was_trained_and_is_frozen_since_is_saved_also_by_a_resumed_run(tmp_path: Path) -> None:
    trained = _fitted(tmp_path, steps=2)
    saved = tmp_path / "step_2.ckpt"
    resumed = _fitted(tmp_path, steps=4, resumed=saved)
    for path in (saved, tmp_path / "step_4.ckpt"):
        assert {name.split(".")[0] for name in Reader(path, None).names("model.")} == {"first", "head"}
    assert torch.equal(resumed.first.weight, trained.first.weight)


def _fitted(folder: Path, steps: int, resumed: Path | None = None) -> FrozenAfterwards:
    module = FrozenAfterwards()
    saves = LastCheckpoints(str(folder), every_n_steps=2)
    trainer = local_trainer(folder, TrainableOnly(), saves, max_steps=steps)
    trainer.fit(module, ckpt_path=resumed)
    return module
