"""The examination of a machine, or of all nodes of a job: versions, devices, disk, and the network between nodes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.utils import collect_env

from lightswitch.cluster import environments, rendezvous
from lightswitch.cluster.placement import reported_variables
from lightswitch.cluster.rendezvous import MeetingPoint
from lightswitch.errors import ExitCode

RUNS = Path("runs")
_LEAST_SHARED_BYTES = 256 * 2**20  # a container has 64 MiB by default
_LEAST_DISK_BYTES = 2**30
_LEAST_FREE_SHARE = 0.5  # of a GPU's memory
_TIMES = {8: 50, 2**20: 10, 2**24: 3}  # size in bytes: number of all-reduces
_TIMES_ON_GPU = {**_TIMES, 2**28: 10}


Findings = dict[str, Any]  # of one process on its machine, in plain types


def examine(problems: list[str], timeout_seconds: float) -> None:
    """Examine this machine and, in a job of several processes, all of its nodes and the network between them.

    Rank 0 prints what is found. Collective.

    Args:
        problems: receives the problems, one line each.
        timeout_seconds: limit for each step.

    Raises:
        Refused: the processes can't connect.
        ValueError: some variables of the rendezvous are not exported.
    """
    environment = environments.detect()
    rank, world_size = environment.global_rank(), environment.world_size()
    own = _findings(rank, environment.local_rank())
    if world_size == 1:
        _print_machines([own], problems)
        return
    point = MeetingPoint(environment.main_address, environment.main_port, rank, world_size, timeout_seconds)
    store = rendezvous.open_store(point, "doctor")
    store.set(str(rank), json.dumps(own))
    if rank == 0:
        print_line("processes", f"{world_size}, rendezvous at {point.address}:{point.port}")
        missing = rendezvous.missing(store, point)
        problems += [f"rank {one} did not join within {timeout_seconds:g} s" for one in missing]
        store.set("came", json.dumps([one for one in range(world_size) if one not in missing]))
    everyone = [json.loads(one) for one in store.multi_get([str(one) for one in json.loads(store.get("came"))])]
    if rank == 0:
        _print_machines(everyone, problems)
    if len(everyone) < world_size:
        return
    backends = ["gloo"]
    if not (without := without_nccl(everyone)):
        backends.append("nccl")
    elif rank == 0 and len(without) < world_size:
        fix = "start one process per GPU on each node, with all GPUs of the node visible to each"
        problems.append(f"NCCL was not tested, because {without[0]}; {fix}")
    for backend in backends:
        if not _measure(backend, PrefixStore(backend, store), point, own["local_rank"], problems):
            return


def print_line(label: str, text: str) -> None:
    """Print a label and a text in columns."""
    print(f"{label:<11} {text}", flush=True)


def end(problems: Sequence[str], rank: int) -> int:
    """Print the problems, and return the exit code."""
    for problem in problems:
        print_line("problem", problem)
    if not problems and rank == 0:
        print_line("", "no problem was found")
    return ExitCode.FAILED if problems else 0


def _print_machines(everyone: Sequence[Findings], problems: list[str]) -> None:
    for one in everyone:
        for number, line in enumerate(one["lines"]):
            print_line("" if number else one["node"], line)
        problems += [f"{one['node']}: {problem}" for problem in one["problems"]]
    print_line("versions", ", ".join(f"{name} {value}" for name, value in everyone[0]["versions"].items()))
    for number, (name, value) in enumerate(reported_variables().items()):
        print_line("" if number else "environment", f"{name}={value}")


# One machine


def _findings(rank: int, local_rank: int) -> Findings:
    lines: list[str] = []
    problems: list[str] = []
    if local_rank == 0:  # the processes of a node share all of it
        gpus = look_for_gpus()
        driver = collect_env.get_nvidia_driver_version(collect_env.run)  # type: ignore[no-untyped-call]  # of torch's
        lines = [*_memory(problems), *gpu_lines(gpus, driver, problems), *_interfaces()]
    return {
        "node": socket.gethostname(),
        "rank": rank,
        "local_rank": local_rank,
        "gpus": torch.cuda.device_count() if dist.is_nccl_available() else 0,  # that NCCL can use
        "versions": rendezvous.software(on_gpu=torch.cuda.is_available()),
        "lines": lines,
        "problems": problems,
    }


def _memory(problems: list[str]) -> Iterator[str]:
    memory = psutil.virtual_memory()
    usable = f"{len(psutil.Process().cpu_affinity())} of " if hasattr(psutil.Process, "cpu_affinity") else ""
    yield f"{usable}{psutil.cpu_count()} CPU cores, {torch.backends.cpu.get_cpu_capability()}"
    yield f"{gib(memory.available)} of {gib(memory.total)} memory free"
    if Path("/dev/shm").exists():
        shared = shutil.disk_usage("/dev/shm").free
        yield f"{gib(shared)} shared memory free"
        if shared < _LEAST_SHARED_BYTES:
            problems.append(f"only {gib(shared)} of shared memory, for loader workers and NCCL; in docker: --ipc=host")
    disk = shutil.disk_usage(RUNS if RUNS.exists() else Path.cwd()).free
    yield f"{gib(disk)} disk free for {RUNS}/"
    if disk < _LEAST_DISK_BYTES:
        problems.append(f"only {gib(disk)} disk free for {RUNS}/, too little for checkpoints; free some space")


def _interfaces() -> Iterator[str]:
    for name, stats in psutil.net_if_stats().items():
        addresses = [a.address for a in psutil.net_if_addrs().get(name, []) if a.family == socket.AF_INET]
        if stats.isup and addresses and name != "lo":
            yield f"{name} {addresses[0]}" + (f", {stats.speed / 1000:g} Gb/s" if stats.speed else "")


@dataclass(frozen=True)
class GPU:
    """A GPU that torch finds.

    Attributes:
        fault: the driver's error; if there is one, the other fields are unset.
    """

    name: str = ""
    free_bytes: int = 0
    total_bytes: int = 0
    fault: str = ""


def look_for_gpus() -> list[GPU]:
    """Initialize and return all GPUs that torch finds; one that is out of memory, or broken, has a fault."""
    found = [GPU("Apple's GPU")] if torch.backends.mps.is_available() else []
    for index in range(torch.cuda.device_count()):
        try:
            found.append(GPU(torch.cuda.get_device_name(index), *torch.cuda.mem_get_info(index)))
        except RuntimeError as error:  # CUDA itself needs some memory, which a busy GPU lacks
            found.append(GPU(fault=str(error).splitlines()[0]))
    return found


def gpu_lines(gpus: Sequence[GPU], driver: str | None, problems: list[str]) -> Iterator[str]:
    """Yield a line each for NVIDIA's driver and the GPUs; add their problems.

    Args:
        driver: version of NVIDIA's driver; None if there is none.
    """
    if driver is not None:
        yield f"NVIDIA driver {driver}"
        if not gpus:
            found = f"torch {torch.__version__} finds no GPU; type nvidia-smi, or install a CUDA build of torch"
            problems.append(f"the NVIDIA driver {driver} is installed, but {found}")
    if not gpus:
        yield "no GPU that torch can use"
    tool = "rocm-smi" if torch.version.hip else "nvidia-smi"
    for index, gpu in enumerate(gpus):
        memory = f"{gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free"
        yield f"GPU {index}: {gpu.fault or gpu.name}" + (f", {memory}" if gpu.total_bytes else "")
        if gpu.fault:
            problems.append(f"GPU {index} can't be used: {gpu.fault}; see its state, and who uses it: {tool}")
        elif gpu.free_bytes < _LEAST_FREE_SHARE * gpu.total_bytes:
            problems.append(f"GPU {index} has {memory}; see who uses it: {tool}")


def gib(count: int) -> str:
    """Return bytes as text: 1.5 GiB."""
    return f"{count / 2**30:.1f} GiB"


# The network


def without_nccl(everyone: Sequence[Findings]) -> list[str]:
    """Return the processes that can't use NCCL, and why.

    Each process uses the GPU of its local rank. If one has none, none may form a group: the others would wait for it.
    """
    without = [one for one in everyone if one["gpus"] <= one["local_rank"]]
    found = "rank {rank} on {node} sees {gpus} GPUs for NCCL, but would use number {local_rank}, from 0"
    return [found.format_map(one) for one in without]


def _measure(backend: str, store: Store, point: MeetingPoint, local_rank: int, problems: list[str]) -> bool:
    """Measure the speed of all-reduces of growing sizes in a new process group, and return whether that worked.

    Rank 0 prints the bus bandwidths, which are comparable between world sizes (nccl-tests, PERFORMANCE.md). Collective.
    """
    limit = threading.Timer(point.timeout_seconds, _give_up, (backend, point, problems))
    limit.daemon = True
    limit.start()
    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    timeout = timedelta(seconds=point.timeout_seconds)
    try:
        dist.init_process_group(backend, store=store, rank=point.rank, world_size=point.world_size, timeout=timeout)
        for size_bytes, times in (_TIMES_ON_GPU if backend == "nccl" else _TIMES).items():
            seconds = _seconds(torch.zeros(size_bytes // 4, device=device), times)
            speed = size_bytes / seconds * 2 * (point.world_size - 1) / point.world_size / 1e9
            found = f"{seconds * 1e6:.0f} µs" if size_bytes == 8 else f"{speed:.2f} GB/s"
            if point.rank == 0:
                size = "8 bytes" if size_bytes == 8 else f"{size_bytes >> 20} MiB"
                print_line("all-reduce" if size_bytes == 8 else "", f"{backend}, {size}: {found}")
        dist.destroy_process_group()
    except RuntimeError as error:
        failure = f"an all-reduce over {backend} failed: {str(error).splitlines()[0]}"
        problems.append(f"{failure}; {_shared_interface(backend)}")
        return False
    finally:
        limit.cancel()
    return True


def _give_up(backend: str, point: MeetingPoint, problems: list[str]) -> NoReturn:
    late = f"an all-reduce over {backend} did not finish in {point.timeout_seconds:g} s"
    code = end([*problems, f"{late}; {_shared_interface(backend)}"], point.rank)
    sys.stdout.flush()
    os._exit(code)  # the main thread may be stuck


def _shared_interface(backend: str) -> str:
    variable = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
    return f"check routes and firewalls, or export the interface that all nodes share: {variable}=eth0"


def _seconds(tensor: torch.Tensor, times: int) -> float:
    for count in (1, times):  # the first one connects the ranks
        start = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
    return (time.perf_counter() - start) / times
