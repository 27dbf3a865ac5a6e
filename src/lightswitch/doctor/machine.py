"""Inspection of a machine by one process: memory, disk, operators, network interfaces and GPUs."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from lightswitch.cluster.placement import reported_variables
from lightswitch.deepspeed.config import operator_problems

_OPS = ("cpu_adam", "fused_adam", "async_io")
_LEAST_SHARED_BYTES = 256 * 2**20  # a container has 64 MiB by default
_LEAST_DISK_BYTES = 2**30
_LEAST_FREE_SHARE = 0.5  # of a GPU's memory


@dataclass(frozen=True)
class Machine:
    """Findings of one process on its machine.

    Attributes:
        node: hostname of the machine.
        local_rank: rank of the process within its node.
        gpus_for_nccl: number of visible GPUs, of NVIDIA or, in a torch for ROCm, of AMD.
        holdings: cores, memory, disk, GPUs and network interfaces, one line each.
        backends: available backends of torch.distributed.
        ops: operators of DeepSpeed, and whether they are built.
        environment: variables that are safe to show.
        problems: one line each, with what to do.
    """

    node: str
    local_rank: int
    gpus_for_nccl: int
    holdings: list[str]
    backends: list[str]
    ops: list[str]
    environment: dict[str, str]
    problems: list[str]


def look_at_machine(local_rank: int, folder: Path) -> Machine:
    """Return the findings of this process. Only the first process of a node reports what all of its processes share.

    Args:
        folder: the folder of the runs.
    """
    node = socket.gethostname()
    first = local_rank == 0
    holdings: list[str] = []
    problems: list[str] = []
    if first:
        found = look_for_gpus()
        holdings = [*_holdings(folder), *gpu_lines(found), *_interfaces()]
        problems = [*_memory_problems(folder), *gpu_problems(found)]
    return Machine(
        node,
        local_rank,
        torch.cuda.device_count(),
        holdings,
        [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()],
        list(_ops()) if first else [],
        reported_variables(),
        [f"{node}: {problem}" for problem in problems],
    )


def _holdings(folder: Path) -> Iterator[str]:
    memory = psutil.virtual_memory()
    usable = f"{len(psutil.Process().cpu_affinity())} of " if hasattr(psutil.Process, "cpu_affinity") else ""
    yield f"{usable}{psutil.cpu_count()} CPU cores, {torch.backends.cpu.get_cpu_capability()}"
    yield f"{gib(memory.available)} of {gib(memory.total)} memory free"
    if (shared := _shared_bytes()) is not None:
        yield f"{gib(shared)} shared memory free"
    yield f"{gib(_disk_bytes(folder))} disk free for {folder}/"


def _shared_bytes() -> int | None:
    return shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else None


def _disk_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder if folder.exists() else Path.cwd()).free


def _memory_problems(folder: Path) -> Iterator[str]:
    shared = _shared_bytes()
    if shared is not None and shared < _LEAST_SHARED_BYTES:
        yield f"only {gib(shared)} shared memory free, too little for loader workers and NCCL; in docker: --ipc=host"
    if _disk_bytes(folder) < _LEAST_DISK_BYTES:
        yield f"only {gib(_disk_bytes(folder))} disk free for {folder}/, too little for checkpoints; free some space"


def _interfaces() -> Iterator[str]:
    for name, stats in psutil.net_if_stats().items():
        addresses = [a.address for a in psutil.net_if_addrs().get(name, []) if a.family == socket.AF_INET]
        if stats.isup and addresses and name != "lo":
            yield f"{name} {addresses[0]}" + (f", {stats.speed / 1000:g} Gb/s" if stats.speed else "")


def _ops() -> Iterator[str]:
    if find_spec("deepspeed") is None:
        yield "DeepSpeed is not installed"
        return
    for op in _OPS:
        yield f"{op} {'not built' if list(operator_problems(op, op)) else 'built'}"


@dataclass(frozen=True)
class GPU:
    """A GPU that torch finds.

    Attributes:
        total_bytes: size of its memory; 0 if it has no memory of its own.
        fault: the driver's error; if there is one, the other fields are unset.
    """

    name: str = ""
    free_bytes: int = 0
    total_bytes: int = 0
    fault: str = ""


@dataclass(frozen=True)
class Accelerators:
    """Accelerators that a process sees.

    Attributes:
        platform: the platform that torch was built for, such as `CUDA 13.0`, `ROCm 7.0` or `MPS`; empty for CPUs only.
        nvidia_driver: version of NVIDIA's driver; None if there is none.
    """

    platform: str = ""
    nvidia_driver: str | None = None
    gpus: Sequence[GPU] = field(default_factory=list)


def look_for_gpus() -> Accelerators:
    """Initialize and return all GPUs that torch finds; one that is out of memory, or broken, has a fault."""
    if torch.backends.mps.is_available():
        return Accelerators("MPS", gpus=[GPU("Apple's GPU")])
    platforms = {"ROCm": torch.version.hip, "CUDA": torch.version.cuda}
    platform = next((f"{name} {version}" for name, version in platforms.items() if version), "")
    return Accelerators(platform, _nvidia_driver(), [_gpu(index) for index in range(torch.cuda.device_count())])


def _gpu(index: int) -> GPU:
    try:
        return GPU(torch.cuda.get_device_name(index), *torch.cuda.mem_get_info(index))
    except RuntimeError as error:  # CUDA itself needs some memory, which a busy GPU lacks
        return GPU(fault=str(error).splitlines()[0])


def _nvidia_driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", path.read_text()) if path.exists() else None
    return found[1] if found else None


def gpu_lines(found: Accelerators) -> Iterator[str]:
    """Yield a line each for driver, platform and GPUs."""
    if found.nvidia_driver is not None:
        yield f"NVIDIA driver {found.nvidia_driver}"
    if found.platform and (found.gpus or found.nvidia_driver):
        yield found.platform
    if not found.gpus:
        yield "no GPU that torch can use"
    for index, gpu in enumerate(found.gpus):
        memory = f", {gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free" if gpu.total_bytes else ""
        yield f"GPU {index}: {gpu.fault or gpu.name}{memory}"


def gpu_problems(found: Accelerators) -> Iterator[str]:
    """Yield the problems of driver, torch and GPUs, one line each."""
    if found.nvidia_driver is not None and not found.platform:
        yield "an NVIDIA driver is installed, but torch was built for CPUs only; install a CUDA build of torch"
    elif found.nvidia_driver is not None and not found.gpus:
        yield f"the NVIDIA driver {found.nvidia_driver} is installed, but torch finds no GPU; type nvidia-smi"
    tool = "rocm-smi" if found.platform.startswith("ROCm") else "nvidia-smi"
    for index, gpu in enumerate(found.gpus):
        if gpu.fault:
            yield f"GPU {index} can't be used: {gpu.fault}; see its state, and who uses it: {tool}"
        elif gpu.free_bytes < _LEAST_FREE_SHARE * gpu.total_bytes:
            yield f"GPU {index} has {gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free; see who uses it: {tool}"


def without_nccl(everyone: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the processes that can't use NCCL, and why, from the findings of all processes.

    Each process uses the GPU of its local rank. If one has none, none may form a group: the others would wait for it.
    """
    return [f"rank {one['rank']} on {one['node']} {fault}" for one in everyone if (fault := _nccl_fault(one))]


def _nccl_fault(one: Mapping[str, Any]) -> str | None:
    if "nccl" not in one["backends"]:
        return "has a torch without NCCL"
    if (seen := one["gpus_for_nccl"]) <= one["local_rank"]:
        return f"sees {seen} GPU{'' if seen == 1 else 's'}, but would use number {one['local_rank']}, from 0"
    return None


def gib(count: int) -> str:
    """Return bytes as text: 1.5 GiB."""
    return f"{count / 2**30:.1f} GiB"
