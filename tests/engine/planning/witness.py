"""What each rank of a real run does: its groups, its samples, its collectives."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy

from lightswitch.planning.collectives import Collective, exchanges
from lightswitch.planning.tracking import Tracking


class Witness(Tracking):
    """Writes witness_<rank>.json: the collectives of step 2, by the ledger; all else as the run itself has it.

    Before that step, DistributedDataParallel still sorts its buckets.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self.seen.append(batch[0].tolist())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        sent = exchanges((one, 1) for micro in self.steps()[2].collectives for one in micro if one != _of_signals())
        told = {"groups": _groups(trainer), "seen": self.seen, "collectives": [asdict(one) for one in sent]}
        (self.folder / f"witness_{trainer.global_rank}.json").write_text(json.dumps(told))


def _of_signals() -> Collective:
    """What ranks tell one another of signals, beside the step: two numbers of 64 bits."""
    return Collective("all_reduce", 16, tuple(range(dist.get_world_size())))


def _groups(trainer: Trainer) -> dict[str, list[int]]:
    if not isinstance(trainer.strategy, ModelParallelStrategy):
        return {"replicate": dist.get_process_group_ranks(dist.group.WORLD)}
    mesh = trainer.strategy.device_mesh
    return {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in mesh.mesh_dim_names or ()}
