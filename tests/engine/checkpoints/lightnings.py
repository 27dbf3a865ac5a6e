"""Checkpoints as Lightning's own strategies write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightswitch.checkpoints.finetuning import Finetuned


class AsLightning(pl.Callback):
    """Writes ``folder``/lightnings.ckpt at the end of training, past what makes checkpoints portable."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / "lightnings.ckpt"

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        stock: Any = super(Finetuned, trainer.strategy)  # the last of these bases
        trainer.strategy._state_dict_type = "sharded"  # FSDPStrategy's, which takes it as an argument
        checkpoint = {"pytorch-lightning_version": pl.__version__, "global_step": trainer.global_step}
        checkpoint["state_dict"] = stock.lightning_module_state_dict()
        checkpoint["optimizer_states"] = [stock.optimizer_state(optimizer) for optimizer in trainer.optimizers]
        stock.save_checkpoint(checkpoint, self.path)
