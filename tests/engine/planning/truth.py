"""What real processes hold in a step, by the ledger that plans are made with."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer

from lightswitch.planning.tracking import Tracking


class Truth(Tracking):
    """Writes the peak of the second step, of each rank."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        step = self.steps()[1]
        told = {**asdict(step.timeline.peak()), "flops": step.flops, "collectives": len(step.collectives)}
        (self.folder / f"peak_{trainer.global_rank}.json").write_text(json.dumps(told))
