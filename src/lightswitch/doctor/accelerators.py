"""Accelerators that a process sees: NVIDIA's, AMD's or Apple's GPUs, and what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_LEAST_FREE_SHARE = 0.5  # of a GPU's memory


@dataclass(frozen=True)
class GPU:
    """A GPU that torch finds.

    Attributes:
        total_bytes: of its memory; 0 where it has none of its own.
        fault: what its driver says in place of all others.
    """

    name: str = ""
    free_bytes: int = 0
    total_bytes: int = 0
    fault: str = ""


@dataclass(frozen=True)
class Accelerators:
    """Accelerators that a process sees.

    Attributes:
        platform: what torch was built for, as `CUDA 13.0`, `ROCm 7.0` or `MPS`; empty where for CPUs alone.
        nvidia_driver: its version; None where there is none.
    """

    platform: str = ""
    nvidia_driver: str | None = None
    gpus: Sequence[GPU] = field(default_factory=list)


def look() -> Accelerators:
    """Return what torch finds; a GPU that is out of memory, or broken, with its fault. Opens each GPU."""
    if torch.backends.mps.is_available():
        return Accelerators("MPS", gpus=[GPU("Apple's GPU")])
    platforms = {"ROCm": torch.version.hip, "CUDA": torch.version.cuda}
    platform = next((f"{name} {version}" for name, version in platforms.items() if version), "")
    return Accelerators(platform, _nvidia_driver(), [_gpu(index) for index in range(torch.cuda.device_count())])


def _gpu(index: int) -> GPU:
    try:
        return GPU(torch.cuda.get_device_name(index), *torch.cuda.mem_get_info(index))
    except RuntimeError as error:  # CUDA needs some memory of its own, which a busy GPU lacks
        return GPU(fault=str(error).splitlines()[0])


def _nvidia_driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", path.read_text()) if path.exists() else None
    return found[1] if found else None


def described(found: Accelerators) -> Iterator[str]:
    """Yield what there is, a line each."""
    if found.nvidia_driver is not None:
        yield f"NVIDIA driver {found.nvidia_driver}"
    if found.platform and (found.gpus or found.nvidia_driver):
        yield found.platform
    if not found.gpus:
        yield "no GPU that torch can use"
    for index, gpu in enumerate(found.gpus):
        memory = f", {gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free" if gpu.total_bytes else ""
        yield f"GPU {index}: {gpu.fault or gpu.name}{memory}"


def problems(found: Accelerators) -> Iterator[str]:
    """Yield what is wrong with them, a line each."""
    if found.nvidia_driver is not None and not found.platform:
        yield "there is an NVIDIA driver, and torch was built for CPUs alone; install a torch for CUDA"
    elif found.nvidia_driver is not None and not found.gpus:
        yield f"the NVIDIA driver {found.nvidia_driver} is there, and torch finds no GPU; look at nvidia-smi"
    tool = "rocm-smi" if found.platform.startswith("ROCm") else "nvidia-smi"
    for index, gpu in enumerate(found.gpus):
        if gpu.fault:
            yield f"GPU {index} can't be used: {gpu.fault}; see its state, and who uses it: {tool}"
        elif gpu.free_bytes < _LEAST_FREE_SHARE * gpu.total_bytes:
            yield f"GPU {index} has {gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free; see who uses it: {tool}"


def without_nccl(everyone: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the processes that can't reduce over NCCL, and why, by what each of them all has told.

    Each takes the GPU of its local rank. If one has none, none may form a group: the others would wait for it.
    """
    return [f"rank {one['rank']} on {one['node']} {fault}" for one in everyone if (fault := _nccl_fault(one))]


def _nccl_fault(one: Mapping[str, Any]) -> str | None:
    if "nccl" not in one["backends"]:
        return "has a torch without NCCL"
    if (seen := one["gpus_for_nccl"]) <= one["local_rank"]:
        return f"sees {seen} GPU{'' if seen == 1 else 's'}, of which it would take number {one['local_rank']}"
    return None


def gib(count: int) -> str:
    """Return bytes as text: 1.5 GiB."""
    return f"{count / 2**30:.1f} GiB"
