"""Ways between nodes, and the speed of all-reduces over them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lightswitch.cluster.rendezvous import MeetingPoint

_REACH_SECONDS = 5.0
_TIMES = {8: 50, 2**20: 10, 2**24: 3}  # bytes: how often they are reduced
_TIMES_ON_GPU = {**_TIMES, 2**28: 10}


class Listener:
    """Socket that answers a byte with the same byte, as long as the process lives.

    Args:
        main_address: of rank 0; the socket listens on the interface that leads there.
    """

    def __init__(self, main_address: str) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there:
            there.connect((main_address, 1))  # sends nothing
            self._socket = socket.create_server((there.getsockname()[0], 0))
        self.address: tuple[str, int] = self._socket.getsockname()
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while True:
            peer, _ = self._socket.accept()
            with peer, contextlib.suppress(OSError):
                peer.settimeout(_REACH_SECONDS)
                peer.sendall(peer.recv(1))


def reach(others: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """Return for each node what went wrong on the way to it; empty where nothing did."""
    with ThreadPoolExecutor(max(1, min(32, len(others)))) as pool:
        return dict(zip(others, pool.map(_fault, others.values()), strict=True))


def _fault(address: tuple[str, int]) -> str:
    try:
        with socket.create_connection(address, _REACH_SECONDS) as peer:
            peer.sendall(b"?")
            return "" if peer.recv(1) == b"?" else "it closed the connection"
    except OSError as error:
        return error.strerror or str(error)


@dataclass(frozen=True)
class Measured:
    """Measurement of an all-reduce; its bus bandwidth compares between world sizes (NVIDIA's nccl-tests,
    PERFORMANCE.md)."""

    size_bytes: int
    seconds: float
    world_size: int

    @property
    def algorithm_bandwidth(self) -> float:  # bytes/s
        return self.size_bytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:  # bytes/s
        return self.algorithm_bandwidth * 2 * (self.world_size - 1) / self.world_size


def measure(backend: str, store: Store, point: MeetingPoint, local_rank: int) -> Iterator[Measured]:
    """Yield the speed of all-reduces of growing sizes over a group of its own. Collective.

    Args:
        backend: gloo or nccl.
        store: where the processes of the group meet.

    Raises:
        RuntimeError: a process failed, or did not come in time.
    """
    on_gpu = backend == "nccl"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    timeout = timedelta(seconds=point.timeout_seconds)
    dist.init_process_group(backend, store=store, rank=point.rank, world_size=point.world_size, timeout=timeout)
    try:
        for size_bytes, times in (_TIMES_ON_GPU if on_gpu else _TIMES).items():
            tensor = torch.zeros(size_bytes // 4, device=device)
            yield Measured(size_bytes, _seconds(tensor, times), point.world_size)
    finally:
        dist.destroy_process_group()


def _seconds(tensor: torch.Tensor, times: int) -> float:
    dist.all_reduce(tensor)
    _finish(tensor)
    start = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(tensor)
    _finish(tensor)
    return (time.perf_counter() - start) / times


def _finish(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
