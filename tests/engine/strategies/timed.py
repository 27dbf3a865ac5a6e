"""The time-outs of a run's process groups, written down for a test."""

from __future__ import annotations

import json
from pathlib import Path

import lightning.pytorch as pl
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from lightswitch.strategies.timeouts import timeouts

TIMED = (
    "callbacks.timed._target_=tests.engine.strategies.timed.Timed",
    "callbacks.timed.folder=${hydra:runtime.output_dir}",
)


class Timed(pl.Callback):
    """Writes timeouts.json when training starts: seconds, by the ranks of each group of rank 0's."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / "timeouts.json"

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            found = [(dist.get_process_group_ranks(group), group) for group in _world.pg_map]
            told = [(ranks, [one.total_seconds() for one in timeouts(group)]) for ranks, group in found]
            self.path.write_text(json.dumps(told))
