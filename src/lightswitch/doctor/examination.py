"""The examination of a machine, or of all nodes of a job, and the report that rank 0 prints."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from lightswitch.cluster import environments, rendezvous
from lightswitch.cluster.rendezvous import MeetingPoint
from lightswitch.doctor.machine import look_at_machine, without_nccl
from lightswitch.errors import ExitCode

RUNS = Path("runs")
CODE = ("train.py", "conf", "src")
_REACH_SECONDS = 20.0  # for an answer of a node, which may be busy starting Python
_QUESTION_SECONDS = 5.0  # for a connected peer to send its byte
_TIMES = {8: 50, 2**20: 10, 2**24: 3}  # size in bytes: number of all-reduces
_TIMES_ON_GPU = {**_TIMES, 2**28: 10}


def examine(report: Report, timeout_seconds: float) -> None:
    """Examine this machine and, in a job of several processes, all of its nodes and the network between them.

    Collective.

    Args:
        report: receives lines and problems.
        timeout_seconds: limit for each step.

    Raises:
        Refused: the processes can't connect.
        ValueError: some variables of the rendezvous are not exported.
    """
    environment = environments.detect()
    rank, local_rank, world_size = environment.global_rank(), environment.local_rank(), environment.world_size()
    found = look_at_machine(local_rank, RUNS)
    versions = rendezvous.software(on_gpu=torch.cuda.is_available())
    if world_size == 1:
        report.machines([asdict(found)])
        report.software(versions, asdict(found))
        return
    report.is_first = rank == 0
    point = MeetingPoint(environment.main_address, environment.main_port, rank, world_size, timeout_seconds)
    report.line("processes", f"{world_size}, rendezvous at {point.address}:{point.port}")
    store = rendezvous.open_store(point, "doctor")
    everyone = _gathered(store, point, {**asdict(found), "rank": rank}, report)
    report.machines(everyone)
    report.software(versions, everyone[0])
    others = _unreached(store, point, everyone, found.node, report)
    if others or len(everyone) < world_size:
        return
    code = rendezvous.digests([path.resolve() for path in map(Path, CODE) if path.exists()])
    shared = RUNS if RUNS.exists() else Path()
    agreed = PrefixStore("agreement", store)
    verdict = rendezvous.compare(agreed, point, {"versions": versions, "code": code}, shared)
    report.problems += [verdict] if verdict and rank == 0 else []
    _measure(_backends(everyone, report), store, point, local_rank, report)


def _backends(everyone: list[dict[str, Any]], report: Report) -> list[str]:
    """Return the backends that all processes can use; the list is the same in each of them."""
    if without := without_nccl(everyone):
        if len(without) < len(everyone) and report.is_first:
            fix = "start one process per GPU on each node, with all GPUs of the node visible to each"
            report.problems.append(f"NCCL was not tested, because {without[0]}; {fix}")
        return ["gloo"]
    return ["gloo", "nccl"]


def _gathered(store: Store, point: MeetingPoint, own: dict[str, Any], report: Report) -> list[dict[str, Any]]:
    """Return the findings of each process that joined in time, with the address at which it listens."""
    listener = Listener(point.address)
    store.set(str(point.rank), json.dumps({**own, "address": listener.address}))
    if point.rank == 0:
        missing = rendezvous.missing(store, point)
        report.problems += [f"rank {rank} did not join within {point.timeout_seconds:g} s" for rank in missing]
        store.set("came", json.dumps([rank for rank in range(point.world_size) if rank not in missing]))
    return [json.loads(one) for one in store.multi_get([str(rank) for rank in json.loads(store.get("came"))])]


def _unreached(
    store: Store, point: MeetingPoint, everyone: list[dict[str, Any]], node: str, report: Report
) -> list[str]:
    """Return the pairs of nodes of which the first can't connect to the second; one process of each node tries."""
    firsts = {one["node"]: one for one in reversed(everyone)}
    is_first = firsts[node]["rank"] == point.rank
    ways = {name: tuple(one["address"]) for name, one in firsts.items() if name != node} if is_first else {}
    faults = [f"{node} → {name}: {fault}" for name, fault in reach(ways).items() if fault]
    store.set(f"faults/{point.rank}", json.dumps(faults))
    of_ranks = store.multi_get([f"faults/{one['rank']}" for one in everyone])
    pairs = [pair for one in of_ranks for pair in json.loads(one)]
    if len(firsts) > 1 and not pairs:
        report.line("network", f"{len(firsts)} nodes, each can connect to every other")
    if report.is_first:
        report.problems += [f"{pair}; check routes and firewalls between the two" for pair in pairs]
    return pairs


def _measure(backends: list[str], store: Store, point: MeetingPoint, local_rank: int, report: Report) -> None:
    for backend in backends:
        limit = threading.Timer(point.timeout_seconds, _give_up, (report, backend, point.timeout_seconds))
        limit.daemon = True
        limit.start()
        try:
            for measured in measure(backend, PrefixStore(backend, store), point, local_rank):
                report.bandwidth(backend, measured)
        except RuntimeError as error:
            report.problems.append(f"an all-reduce over {backend} failed: {str(error).splitlines()[0]}")
            return
        finally:
            limit.cancel()


def _give_up(report: Report, backend: str, timeout_seconds: float) -> NoReturn:
    variable = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    report.problems.append(
        f"an all-reduce over {backend} did not finish in {timeout_seconds:g} s; "
        f"export the network interface that all nodes share: {variable}=eth0"
    )
    code = report.end()
    sys.stdout.flush()
    os._exit(code)  # the main thread may be stuck


class Listener:
    """Socket that answers each connection's first byte with the same byte, until the process ends.

    Args:
        main_address: address of rank 0; the socket listens on the interface that routes there. On the node of rank 0,
            its name may mean the loopback interface (127.0.1.1 in Debian's /etc/hosts): the socket then listens on all
            interfaces, and its host is the name, by which the other nodes have reached this one.

    Attributes:
        address: host and port to connect to.
    """

    def __init__(self, main_address: str) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there:
            there.connect((main_address, 1))  # sends nothing
            own = there.getsockname()[0]
        is_by_name = ipaddress.ip_address(own).is_loopback and _is_name(main_address)
        self._socket = socket.create_server(("" if is_by_name else own, 0))
        self.address: tuple[str, int] = (main_address if is_by_name else own, self._socket.getsockname()[1])
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while True:
            peer, _ = self._socket.accept()
            with peer, contextlib.suppress(OSError):
                peer.settimeout(_QUESTION_SECONDS)
                peer.sendall(peer.recv(1))


def _is_name(address: str) -> bool:
    """Return whether an address is a name that other nodes may resolve to another address than this one does."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return address != "localhost"
    return False


def reach(others: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """Return the connection error for each node; an empty string if the node answered."""
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
    """Measurement of an all-reduce; bus bandwidths are comparable between world sizes (NVIDIA's nccl-tests,
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
    """Yield the speed of all-reduces of growing sizes in a new process group. Collective.

    Args:
        backend: gloo or nccl.
        store: the store for the rendezvous of the group.

    Raises:
        RuntimeError: a process failed, or did not join in time.
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


@dataclass
class Report:
    """Report of one process, which prints its problems and, on rank 0, its lines.

    Attributes:
        is_first: whether this process is rank 0.
        problems: one line each, printed at the end.
    """

    is_first: bool = True
    problems: list[str] = field(default_factory=list)

    def line(self, label: str, text: str) -> None:
        """Print a label and a text in columns."""
        if self.is_first:
            print(f"{label:<11} {text}", flush=True)

    def machines(self, everyone: Sequence[Mapping[str, Any]]) -> None:
        """Print the resources of each node, and add its problems to the report."""
        for one in everyone:
            for number, holding in enumerate(one["holdings"]):
                self.line(one["node"] if number == 0 else "", holding)
            if self.is_first:
                self.problems += one["problems"]

    def software(self, versions: Mapping[str, str], machine: Mapping[str, Any]) -> None:
        """Print versions, backends, operators and variables."""
        self.line("versions", ", ".join(f"{name} {value}" for name, value in versions.items()))
        self.line("backends", ", ".join(machine["backends"]))
        self.line("operators", ", ".join(machine["ops"]))
        for number, (name, value) in enumerate(machine["environment"].items()):
            self.line("" if number else "environment", f"{name}={value}")

    def bandwidth(self, backend: str, measured: Measured) -> None:
        """Print the speed of an all-reduce: µs for the smallest, GB/s for others."""
        if measured.size_bytes == 8:
            self.line("all-reduce", f"{backend}, 8 bytes: {measured.seconds * 1e6:.0f} µs")
            return
        speeds = (measured.algorithm_bandwidth / 1e9, measured.bus_bandwidth / 1e9)
        self.line("", f"{backend}, {measured.size_bytes >> 20} MiB: {speeds[0]:.2f} GB/s, bus {speeds[1]:.2f} GB/s")

    def end(self) -> int:
        """Print the problems, and return the exit code."""
        for problem in self.problems:
            print(f"problem     {problem}", flush=True)
        if not self.problems:
            self.line("", "no problem was found")
        return ExitCode.FAILED if self.problems else 0
