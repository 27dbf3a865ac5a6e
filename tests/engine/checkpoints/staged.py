"""Strategies that tell what each rank stages for a checkpoint, and a model that tells whether CUDA was opened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from lightning.pytorch.strategies import Strategy

from lightswitch.checkpoints.portable import PortableCheckpoints
from lightswitch.checkpoints.shards import Stored, local
from lightswitch.strategies.ddp import DDP
from lightswitch.strategies.fsdp import FSDP
from tests.engine.plain import PlainModel


class Telling(PortableCheckpoints, Strategy):
    def stage(self, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
        staged = super().stage(tensors)
        told_bytes = sum(local(tensor).nbytes for tensor in staged.values())
        Path(f"staged_{self.global_rank}").write_text(str(told_bytes))
        return staged


class TellingDDP(Telling, DDP):
    pass


class TellingFSDP(Telling, FSDP):
    pass


class LeavesGPUsAlone(PlainModel):
    def on_fit_end(self) -> None:
        assert not torch.cuda.is_initialized()
