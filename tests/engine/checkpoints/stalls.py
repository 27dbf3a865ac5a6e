"""Ranks that fail, or come to nothing, in the middle of a save."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightswitch.checkpoints.shards import Piece
from lightswitch.strategies.ddp import DDP
from tests.engine.plain import PlainModel


class Raises(PlainModel):
    """On rank 1, while a checkpoint is put together."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 1:
            raise RuntimeError("no room")


class Absent(PlainModel):
    """Rank 1 comes to no save."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 1:
            time.sleep(3600)


class FailsAndStalls(DDP):
    """The disk of rank 1 fails it in the second write, and in the third it takes its time."""

    def __init__(self, timeout_seconds: float = 1800, stall_seconds: float = 0) -> None:
        super().__init__(timeout_seconds=timeout_seconds)
        self.stall_seconds = stall_seconds
        self._writes = 0

    def stage(self, tensors: Mapping[str, Tensor | Piece]) -> dict[str, Tensor | Piece]:
        self._writes += 1
        staged = super().stage(tensors)
        whole = self.lightning_module.get_parameter("net.0.weight").detach().clone()
        part = whole.numel() // 2
        disk = {2: Failing, 3: Stalling}.get(self._writes, Piece) if dist.get_rank() == 1 else Piece
        piece = disk(whole.flatten().narrow(0, dist.get_rank() * part, part), whole.shape, dist.get_rank() * part)
        if isinstance(piece, Stalling):
            object.__setattr__(piece, "seconds", self.stall_seconds)
        return {**staged, "model.net.0.weight": piece}


class Failing(Piece):
    def __get_tensor_shard__(self, index: Any) -> Tensor:
        raise TypeError("no such device")


@dataclass(frozen=True)
class Stalling(Piece):
    seconds: float = 0

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        time.sleep(self.seconds)
        return super().__get_tensor_shard__(index)
