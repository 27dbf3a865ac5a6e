"""One device."""

from __future__ import annotations

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightswitch.checkpoints.portable import PortableCheckpoints


class Single(PortableCheckpoints, SingleDeviceStrategy):
    """One device: Lightning's strategy on the Trainer's device, where Lightning's own wants the device's name.

    Attributes:
        parallel_devices: set by the Trainer, which looks for an attribute of this name; its one device.
    """

    parallel_devices: list[torch.device] | None = None

    def __init__(self) -> None:
        super().__init__(device="cpu")

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else self._root_device
