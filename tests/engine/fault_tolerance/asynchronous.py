"""Ranks that enter a collective and go on, as under NCCL, and one that does not enter it."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.engine.plain import PlainModel


class AsynchronousModel(PlainModel):
    """At its third batch rank 1 stands still, and the others stand elsewhere than in the collective that lacks it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.trainer.global_rank == 1:
            time.sleep(1000)
        if batch_idx == 2:
            entered = dist.all_reduce(torch.ones(1), async_op=True)
            while not entered.is_completed():
                time.sleep(0.01)
        return super().training_step(batch, batch_idx)
