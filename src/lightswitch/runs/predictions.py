"""The files of predictions that `mode=predict` writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter


class PredictionWriter(BasePredictionWriter):
    """Write each rank's predictions to ``predictions/rank_<n>.pt`` in the run directory.

    Ranks hold contiguous shares: their files, in the order of ranks, are in the order of the data set. Over a stream
    they take turns: the first batch of each file, in the order of ranks, then the second of each.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        share = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        if trainer.global_rank % (trainer.world_size // share["num_replicas"]):
            return  # another rank of a tensor-parallel group has predicted the same
        folder = Path(trainer.default_root_dir) / "predictions"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(predictions, folder / f"rank_{share['rank']}.pt")
        if trainer.is_global_zero:
            _remove_others(folder, share["num_replicas"])


def _remove_others(folder: Path, files: int) -> None:
    """Remove what an earlier start wrote on more devices: the same samples would be there twice."""
    for path in folder.glob("rank_*.pt"):
        number = path.stem.removeprefix("rank_")
        if number.isdecimal() and int(number) >= files:
            path.unlink()
