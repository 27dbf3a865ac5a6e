"""One device."""

from __future__ import annotations

import torch
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightswitch.checkpoints.portable import PortableCheckpoints


class Single(PortableCheckpoints, SingleDeviceStrategy):
    """One device: Lightning's strategy on the Trainer's accelerator, where Lightning's own wants the device's name."""

    def __init__(self) -> None:
        super().__init__(device="cpu")

    @property
    def root_device(self) -> torch.device:
        kinds = {CUDAAccelerator: "cuda:0", MPSAccelerator: "mps:0"}
        return torch.device(kinds.get(type(self.accelerator), "cpu"))  # type: ignore[arg-type]  # None before the Trainer sets it
