"""Findings of one process on its machine."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from lightswitch.cluster import variables
from lightswitch.deepspeed import ops

_OPS = ("cpu_adam", "fused_adam", "async_io")
_LEAST_SHARED_BYTES = 256 * 2**20  # a container has 64 MiB where nobody asked for more
_LEAST_DISK_BYTES = 2**30
_LEAST_FREE_SHARE = 0.5  # of a GPU's memory


@dataclass(frozen=True)
class Machine:
    """Findings of one process on its machine.

    Attributes:
        node: its hostname.
        holdings: what it has, a line each: cores, memory, disk, GPUs, network interfaces.
        backends: of torch.distributed.
        ops: operators of DeepSpeed, and whether they are built.
        environment: variables that are safe to show.
        problems: a line each, with what to do.
    """

    node: str
    holdings: list[str]  # a line each
    backends: list[str]
    ops: list[str]
    environment: dict[str, str]
    problems: list[str]


def look(local_rank: int, folder: Path) -> Machine:
    """Return what this process finds on its machine. What all processes of a node share is told by the first of them.

    Args:
        folder: where the runs go.
    """
    node = socket.gethostname()
    first = local_rank == 0  # what all processes of a node share is reported by one
    problems = [*_memory_problems(folder), *_gpu_problems()] if first else []
    return Machine(
        node,
        [*_holdings(folder), *_gpus(), *_interfaces()] if first else [],
        [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()],
        list(_ops()) if first else [],
        variables.shown(),
        [f"{node}: {problem}" for problem in problems],
    )


def _holdings(folder: Path) -> Iterator[str]:
    memory = psutil.virtual_memory()
    yield (
        f"{len(psutil.Process().cpu_affinity())} of {psutil.cpu_count()} CPU cores"
        if hasattr(psutil.Process, "cpu_affinity")
        else f"{psutil.cpu_count()} CPU cores"
    )
    yield f"{_gib(memory.available)} of {_gib(memory.total)} memory free"
    if (shared := _shared_bytes()) is not None:
        yield f"{_gib(shared)} shared memory free"
    yield f"{_gib(_disk_bytes(folder))} disk free for {folder}/"


def _shared_bytes() -> int | None:
    return shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else None


def _disk_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder if folder.exists() else Path.cwd()).free


def _memory_problems(folder: Path) -> Iterator[str]:
    shared = _shared_bytes()
    if shared is not None and shared < _LEAST_SHARED_BYTES:
        yield f"{_gib(shared)} of shared memory, which loader workers and NCCL need; in docker: --ipc=host"
    if _disk_bytes(folder) < _LEAST_DISK_BYTES:
        yield f"{_gib(_disk_bytes(folder))} disk free for {folder}/; checkpoints need more: make room"


def _gpus() -> Iterator[str]:
    if (driver := _driver()) is not None:
        yield f"NVIDIA driver {driver}"
    if not torch.cuda.is_available():
        yield "no GPU that torch can use"
        return
    yield f"CUDA {torch.version.cuda}"
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        yield f"GPU {index}: {torch.cuda.get_device_name(index)}, {_gib(free)} of {_gib(total)} free"


def _gpu_problems() -> Iterator[str]:
    if not torch.cuda.is_available():
        if _driver() is not None and torch.version.cuda is None:
            yield "there is an NVIDIA driver, and torch was built for CPUs alone; install a torch for CUDA"
        elif _driver() is not None:
            yield f"the NVIDIA driver {_driver()} is there, and torch finds no GPU; look at nvidia-smi"
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        if free < _LEAST_FREE_SHARE * total:
            yield f"GPU {index} has {_gib(free)} of {_gib(total)} free; see who uses it: nvidia-smi"


def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", path.read_text()) if path.exists() else None
    return found[1] if found else None


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
        yield f"{op} {'not built' if list(ops.problems(op, op)) else 'built'}"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
