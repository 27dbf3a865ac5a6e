"""A device of a run: what it holds, how fast it is at most, and the precisions in which it computes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from lightswitch.process import call_each_forked

GIB = 2**30

# On a GPU, beside the tensors of the step:
CONTEXT_BYTES = GIB // 2  # CUDA's context and the kernels of torch, 0.4 to 0.6 GiB of a process without tensors
CUBLAS_BYTES = 32 * 2**20  # its workspace on Hopper, the largest (torch, CUDAContextLight.h: cublas workspace size)
NCCL_BYTES = 32 * 2 * 4 * 2**20  # of a group: channels × directions × NCCL_BUFFSIZE (NCCL user guide)
HIDDEN_SHARE = 0.01  # of its memory, which the driver keeps: torch reports 79.2 GiB of 80
FRAGMENTED_SHARE = 0.03  # of the tensors: what the caching allocator holds in pieces that fit nothing; an assumption
UNASKED_PRECISION = "32-true"  # of a run of which nobody said it
ALL_PRECISIONS = "all"
_FASTER = {"bf16": "bf16-mixed", "fp16": "16-mixed"}  # by the arithmetic of a device; the first that it has


@dataclass(frozen=True)
class Device:
    """A device, and what connects it to others.

    Attributes:
        tflops: peaks by the arithmetic of matrices (fp64, fp32, tf32, bf16, fp16), in 10¹² operations a second;
            empty where nobody has said them.
        memory_gb_per_second, link_gb_per_second, network_gb_per_second: of its memory; to others of its node, in one
            direction; from a node to others, in one direction. In 10⁹ bytes a second; None for what is not known.
        host_gib: of the host's memory, for all devices of a node; None for what is not known.
        host_gb_per_second: to and from the host's memory, in one direction: by default that of PCIe 4.0 × 16.
        kind: cuda, also for AMD's; or cpu, whose memory all processes of a node share.
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

    def with_memory(self, gib: float | None) -> Device:
        """Return the device with another size of memory; unchanged for None."""
        return self if gib is None else replace(self, memory_gib=gib)

    def usable_bytes(self, devices_per_node: int) -> float:
        """Return the bytes of the device's memory that a process can have."""
        if self.kind == "cpu":
            return self.memory_gib * GIB / devices_per_node
        return self.memory_gib * GIB * (1 - HIDDEN_SHARE)

    def host_bytes(self, devices_per_node: int) -> float:
        """Return the bytes of the host's memory that a process can have."""
        return math.inf if self.host_gib is None else self.host_gib * GIB / devices_per_node

    def runtime_bytes(self, tensor_bytes: float, groups: int) -> float:
        """Return the bytes that a process takes on the device beside the tensors of a step.

        Args:
            groups: process groups in which it communicates.
        """
        if self.kind == "cpu":
            return 0
        return CONTEXT_BYTES + CUBLAS_BYTES + groups * NCCL_BYTES + FRAGMENTED_SHARE * tensor_bytes

    def peak_flops(self, precision: str, matmul_precision: str) -> float | None:
        """Return operations a second of matrices in a precision or dtype; None where they are not known.

        A device without bfloat16 takes 32 bits for it.
        """
        name = _ARITHMETIC.get(precision.partition("-")[0], "fp32")
        if name == "fp32" and matmul_precision != "highest":
            name = "tf32"
        tflops = self.tflops.get(name, self.tflops.get("fp32"))
        return None if tflops is None else tflops * 1e12


# by the first part of a precision's name, and by torch's dtypes
_ARITHMETIC = {"16": "fp16", "bf16": "bf16", "64": "fp64", "float16": "fp16", "bfloat16": "bf16"}


def here() -> Device:
    """Return this machine's smallest GPU, or its CPU with the memory that is free now.

    GPUs are looked at in a process of its own: ranks that are forked from this one can't use CUDA once it has.
    """
    import psutil
    import torch

    free_gib = psutil.virtual_memory().available / GIB
    if torch.cuda.device_count():  # by NVML
        is_open = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
        name, bytes = _smallest_gpu() if is_open else call_each_forked([_smallest_gpu])[0]
        return Device(name, bytes / GIB, {}, host_gib=free_gib)
    return Device("this machine's CPU", free_gib, {}, kind="cpu")


def _smallest_gpu() -> tuple[str, int]:
    import torch

    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    smallest = min(found, key=lambda properties: properties.total_memory)
    return smallest.name, smallest.total_memory


@dataclass(frozen=True)
class Precision:
    """A precision, and how it is chosen.

    Attributes:
        name: as it is typed.
        value: of ``trainer.precision``: a name of Lightning's, or the node of a plugin.
    """

    name: str
    value: Any


def compared_precisions(asked: object, files: Mapping[str, Path], device: Device, is_chosen: bool) -> list[Precision]:
    """Return the precisions to plan in; none where it is the run's alone.

    Args:
        asked: plan.precisions: names, ``all`` of them, or None.
        files: of the config folders' precisions, by name.
        is_chosen: whether the run's own was asked for. If not, it is compared with the one in which the device is
            faster and the weights stay in 32 bits.
    """
    names = list(files) if asked == ALL_PRECISIONS else named_precisions(asked)
    if asked is None and not is_chosen:
        faster = [name for arithmetic, name in _FASTER.items() if arithmetic in device.tflops and name in files]
        names = [UNASKED_PRECISION, *faster[:1]] if faster and UNASKED_PRECISION in files else []
    return [Precision(name, _value(files[name])) for name in dict.fromkeys(names)]


def named_precisions(asked: object) -> list[str]:
    """Return the names in plan.precisions, which is a list, one name, or None."""
    those: Iterable[object] = asked if isinstance(asked, Sequence) and not isinstance(asked, str) else [asked]
    return [str(name) for name in those if name is not None]


def _value(path: Path) -> Any:
    loaded: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    return loaded.get("precision")


def precision_problems(precision: str, device: Device) -> Iterator[str]:
    """Yield that a device has no arithmetic in a precision: torch emulates bfloat16, more slowly than 32 bits."""
    if precision.startswith("bf16") and device.tflops and "bf16" not in device.tflops:
        told = f"{device.name} has no bfloat16, and torch would emulate it"
        yield f"precision={precision}: {told}; use 16-mixed or 32-true"
