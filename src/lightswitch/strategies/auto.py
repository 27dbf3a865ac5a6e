"""The default strategy: what strategy=auto is where launch/auto.py has not decided on another."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.device_parser import _select_auto_accelerator
from lightning.pytorch.accelerators import AcceleratorRegistry, CUDAAccelerator
from lightning.pytorch.strategies import Strategy

from lightswitch.strategies.ddp import DDP
from lightswitch.strategies.single import Single


def auto(accelerator: Any, devices: Any, num_nodes: Any) -> Strategy:
    """Return the strategy for a number of devices: one as it is, several under ddp.

    The arguments have no types, as those of the Trainer are checked: a mistake in one would be told twice.

    Args:
        accelerator, devices, num_nodes: the Trainer's own.
    """
    return DDP() if num_nodes > 1 or _devices(accelerator, devices) > 1 else Single()


def _devices(accelerator: str, devices: int | str | list[int]) -> int:
    """Return the number of devices on a node as the Trainer counts them."""
    name = {"auto": _select_auto_accelerator(), "gpu": "cuda" if CUDAAccelerator.is_available() else "mps"}
    kind = AcceleratorRegistry.get(name.get(accelerator, accelerator))
    count = kind.auto_device_count() if devices == "auto" else devices
    return len(kind.get_parallel_devices(kind.parse_devices(count)))
