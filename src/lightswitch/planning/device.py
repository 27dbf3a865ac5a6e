"""A device of a run: its memory, peak speeds and precisions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

GIB = 2**30

# Memory on a GPU beside the tensors of the step:
CONTEXT_BYTES = GIB // 2  # CUDA context and torch's kernels: 0.4 to 0.6 GiB in a process without tensors
CUBLAS_BYTES = 32 * 2**20  # cuBLAS workspace on Hopper, the largest (torch, CUDAContextLight.h: cublas workspace size)
NCCL_BYTES = 32 * 2 * 4 * 2**20  # per process group: channels × directions × NCCL_BUFFSIZE (NCCL user guide)
HIDDEN_SHARE = 0.01  # share of the memory that the driver reserves: torch reports 79.2 GiB of 80
FRAGMENTED_SHARE = 0.03  # share of the tensors that the caching allocator loses to fragmentation; an assumption


@dataclass(frozen=True)
class World:
    """Size of a run's world."""

    nodes: int
    devices_per_node: int

    @property
    def size(self) -> int:
        """Total number of ranks."""
        return self.nodes * self.devices_per_node


@dataclass(frozen=True)
class Device:
    """A device and its connections to others.

    Attributes:
        tflops: peak matrix arithmetic by format (fp64, fp32, tf32, bf16, fp16), in 10¹² operations per second; empty
            if unknown.
        memory_gb_per_second, link_gb_per_second, network_gb_per_second: bandwidth of its memory; to other devices of
            the node, in one direction; from a node to other nodes, in one direction. In 10⁹ bytes per second; None if
            unknown.
        host_gib: the host's memory, for all devices of a node; None if unknown.
        host_gb_per_second: bandwidth to or from the host's memory, in one direction; default: PCIe 4.0 × 16.
        kind: cuda, also for AMD GPUs; or cpu, whose memory is shared by all processes of a node.
    """

    name: str
    memory_gib: float
    tflops: Mapping[str, float]
    memory_gb_per_second: float | None = None
    link_gb_per_second: float | None = None
    network_gb_per_second: float | None = None
    host_gib: float | None = None
    host_gb_per_second: float = 31.5
    kind: Literal["cuda", "cpu"] = "cuda"

    @property
    def is_host(self) -> bool:
        """Whether its memory is the host's, so that offloading to the host saves nothing."""
        return self.kind == "cpu"

    def with_memory(self, gib: float | None) -> Device:
        """Return the device with another memory size; unchanged if None."""
        return self if gib is None else replace(self, memory_gib=gib)

    def usable_bytes(self, devices_per_node: int) -> float:
        """Return the bytes of the device's memory that a process can use."""
        if self.kind == "cpu":
            return self.memory_gib * GIB / devices_per_node
        return self.memory_gib * GIB * (1 - HIDDEN_SHARE)

    def host_bytes(self, devices_per_node: int) -> float:
        """Return the bytes of the host's memory that a process can use; infinity if unknown."""
        return math.inf if self.host_gib is None else self.host_gib * GIB / devices_per_node

    def runtime_bytes(self, tensor_bytes: float, groups: int) -> float:
        """Return the bytes that a process uses on the device beside the tensors of a step.

        Args:
            groups: number of process groups in which it communicates.
        """
        if self.kind == "cpu":
            return 0
        return CONTEXT_BYTES + CUBLAS_BYTES + groups * NCCL_BYTES + FRAGMENTED_SHARE * tensor_bytes

    def tensor_bytes(self, usable_bytes: float, groups: int) -> float:
        """Return the bytes of tensors that fit beside `runtime_bytes`."""
        return (usable_bytes - self.runtime_bytes(0, groups)) / (1 if self.kind == "cpu" else 1 + FRAGMENTED_SHARE)

    def peak_flops(self, precision: str, matmul_precision: str) -> float | None:
        """Return the peak matrix operations per second in a precision; None if unknown.

        If the device has no entry for a format, such as bfloat16, the speed is that of 32 bits.
        """
        name = _ARITHMETIC.get(precision.partition("-")[0], "fp32")
        if name == "fp32" and matmul_precision != "highest":
            name = "tf32"
        tflops = self.tflops.get(name, self.tflops.get("fp32"))
        return None if tflops is None else tflops * 1e12


_ARITHMETIC = {"16": "fp16", "bf16": "bf16", "64": "fp64"}  # by the prefix of a precision's name


def here() -> Device:
    """Return this machine's GPU with the least memory or, without GPUs, its CPU with the currently free memory."""
    import psutil
    import torch

    free_gib = psutil.virtual_memory().available / GIB
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    if not gpus:
        return Device("this machine's CPU", free_gib, {}, kind="cpu")
    smallest = min(gpus, key=lambda gpu: gpu.total_memory)
    return Device(smallest.name, smallest.total_memory / GIB, {}, host_gib=free_gib)


def precision_problems(precision: str, device: Device) -> Iterator[str]:
    """Yield a problem if the device lacks bfloat16, which torch then emulates more slowly than 32 bits."""
    if precision.startswith("bf16") and device.tflops and "bf16" not in device.tflops:
        message = f"{device.name} has no bfloat16, and torch would emulate it"
        yield f"precision={precision}: {message}; use 16-mixed or 32-true"
