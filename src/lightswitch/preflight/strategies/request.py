"""What of a run decides whether its strategy can take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Request:
    strategy: dict[str, Any]  # the config node trainer.strategy
    model: dict[str, Any]  # the config node model
    trainer: dict[str, Any]  # the config node trainer
    nodes: int
    devices: int  # a node
    on_gpu: bool
    batch: tuple[int, int | None] = (1, None)  # global_batch_size and micro_batch_size

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices

    @property
    def precision(self) -> str:
        return str(self.trainer.get("precision"))
