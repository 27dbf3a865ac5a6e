"""Parts of a run by which its strategy can take it or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Request:
    """Parts of a run's config by which its strategy can take it or not.

    Attributes:
        strategy, model, trainer: nodes of the config, resolved.
        devices: of a node.
        accelerator: the one in use: cpu, cuda, mps or tpu.
        batch: global_batch_size and micro_batch_size, in samples.
    """

    strategy: dict[str, Any]  # the config node trainer.strategy
    model: dict[str, Any]  # the config node model
    trainer: dict[str, Any]  # the config node trainer
    nodes: int
    devices: int  # a node
    accelerator: str
    batch: tuple[int, int | None] = (1, None)  # global_batch_size and micro_batch_size

    @property
    def world_size(self) -> int:
        """Devices of the run, over all nodes."""
        return self.nodes * self.devices

    @property
    def on_gpu(self) -> bool:
        """Return whether the run is on GPUs that NCCL connects, or AMD's RCCL."""
        return self.accelerator == "cuda"

    @property
    def precision(self) -> str:
        """Name of the precision, as typed."""
        return str(self.trainer.get("precision"))
