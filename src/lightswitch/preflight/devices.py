"""Devices of a run: how many are meant, of which kind, and whether this machine has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightswitch.errors import nearest

_AS_MANY_AS_THERE_ARE = ("auto", -1, "-1")


def wrong_counts(trainer: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the numbers of nodes and devices, whatever the machine has."""
    nodes, devices = trainer["num_nodes"], trainer["devices"]
    if type(nodes) is not int or nodes < 1:
        yield f"trainer.num_nodes={nodes}: use a number from 1"
    try:
        wrong = devices not in _AS_MANY_AS_THERE_ARE and count(devices) < 1
    except ValueError:
        wrong = True
    if wrong:
        yield f"trainer.devices={devices}: use a number from 1, a list of GPUs such as [0,1], -1 or auto"


def count(devices: int | str | list[int]) -> int:
    """Return the number of devices a node that `Trainer(devices=)` means."""
    if isinstance(devices, list):
        return len(devices)
    if devices in _AS_MANY_AS_THERE_ARE:
        from lightning.pytorch.accelerators import CUDAAccelerator

        return max(1, CUDAAccelerator.auto_device_count())
    if isinstance(devices, str) and "," in devices:  # "2," is the one GPU with the index 2
        return len([index for index in devices.split(",") if index.strip()])
    return int(devices)


def absent(trainer: dict[str, Any]) -> Iterator[str]:
    """Yield what is asked of accelerators that this machine does not have."""
    from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator

    name, devices = trainer.get("accelerator", "auto"), trainer["devices"]
    kinds = {"gpu": CUDAAccelerator, "cuda": CUDAAccelerator, "mps": MPSAccelerator, "cpu": CPUAccelerator}
    if name not in (*kinds, "auto", "tpu"):
        yield f"trainer.accelerator={name} is unknown.{nearest(name, kinds)} Choices: auto, {', '.join(kinds)}, tpu"
    name = accelerator(trainer)
    if name == "cpu":
        yield from _on_cpu(devices)
    if name not in ("gpu", "cuda", "mps"):
        return
    present = kinds[name].auto_device_count() if kinds[name].is_available() else 0
    if not present:
        yield f"trainer.accelerator={name}: this machine has none; use trainer.accelerator=cpu"
    elif count(devices) > present:
        yield f"trainer.devices={devices}: this machine has {present} of {name}; use trainer.devices={present}"


def _on_cpu(devices: int | str | list[int]) -> Iterator[str]:
    if devices in (-1, "-1") or isinstance(devices, list) or "," in str(devices):
        yield f"trainer.devices={devices} names GPUs, and the run is on the CPU; use a number of processes or auto"


def accelerator(trainer: dict[str, Any]) -> str:
    """Return the accelerator in use: what `auto` stands for on this machine."""
    from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator

    name = str(trainer.get("accelerator", "auto"))
    if name != "auto":
        return name
    return "gpu" if CUDAAccelerator.is_available() else "mps" if MPSAccelerator.is_available() else "cpu"
