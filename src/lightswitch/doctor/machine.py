"""Findings of one process on its machine."""

from __future__ import annotations

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
from lightswitch.doctor import accelerators
from lightswitch.doctor.accelerators import gib

_OPS = ("cpu_adam", "fused_adam", "async_io")
_LEAST_SHARED_BYTES = 256 * 2**20  # a container has 64 MiB where nobody asked for more
_LEAST_DISK_BYTES = 2**30


@dataclass(frozen=True)
class Machine:
    """Findings of one process on its machine.

    Attributes:
        node: its hostname.
        local_rank: of the process among those of its node.
        gpus_for_nccl: how many it sees: NVIDIA's, or AMD's in a torch for ROCm.
        holdings: what it has, a line each: cores, memory, disk, GPUs, network interfaces.
        backends: of torch.distributed.
        ops: operators of DeepSpeed, and whether they are built.
        environment: variables that are safe to show.
        problems: a line each, with what to do.
    """

    node: str
    local_rank: int
    gpus_for_nccl: int
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
    holdings: list[str] = []
    problems: list[str] = []
    if first:
        found = accelerators.look()
        holdings = [*_holdings(folder), *accelerators.described(found), *_interfaces()]
        problems = [*_memory_problems(folder), *accelerators.problems(found)]
    return Machine(
        node,
        local_rank,
        torch.cuda.device_count(),
        holdings,
        [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()],
        list(_ops()) if first else [],
        variables.shown(),
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
        yield f"{gib(shared)} of shared memory, which loader workers and NCCL need; in docker: --ipc=host"
    if _disk_bytes(folder) < _LEAST_DISK_BYTES:
        yield f"{gib(_disk_bytes(folder))} disk free for {folder}/; checkpoints need more: make room"


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
