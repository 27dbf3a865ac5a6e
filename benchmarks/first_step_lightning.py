"""The run of benchmarks.first_step as Lightning modules.

python -m benchmarks.first_step_lightning       # in a plain Trainer
python -m benchmarks.first_step_lightning 2     # trains two steps, and saves; then again without a number: goes on
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from benchmarks import first_step


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = first_step.network()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, classes = batch
        return nn.functional.cross_entropy(self.net(inputs), classes)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Optimizer:
        return first_step.optimizer(self)


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(first_step.samples(), first_step.BATCH, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(first_step.samples(), first_step.BATCH)


class EndsAtFirstStep(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        first_step.end()


def main() -> None:
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    saved, steps = Path("saved.ckpt"), [int(steps) for steps in sys.argv[1:]]
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        gradient_clip_val=1.0,
        callbacks=[] if steps else [EndsAtFirstStep()],
        max_steps=steps[0] if steps else 500,
        **quiet,
    )
    trainer.fit(Model(), Data(), ckpt_path=saved if saved.exists() else None)
    trainer.save_checkpoint(saved)


if __name__ == "__main__":
    main()
