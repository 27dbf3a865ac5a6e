"""Parts of a step's time, by torch's profiler: attention, products, loss, norms, optimizer, copies, gaps."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# Patterns in names of kernels and operators of torch, cuBLAS, NCCL and inductor, tried in this order
PARTS = {
    "communication": r"nccl|all_?reduce|all_?gather|reduce_?scatter|gloo|c10d",
    "attention": r"attention|flash|fmha|sdpa?_",
    "products": r"gemm|mm\b|mm_|matmul|cutlass|cublas|nvjet|xmma|aten::linear|mkldnn_linear",
    "loss": r"softmax|nll_loss|cross_entropy|logsumexp|gather|scatter",
    "optimizer": r"adam|multi_tensor|foreach|aten::lerp|linalg_vector_norm|clip",
    "norms": r"norm",
    "copies": r"copy|memcpy|memset|aten::cat|catarray|fill|zero_|contiguous|pin_memory",
}
ELSEWHERE, GAPS = "all else", "gaps"


class Profile:
    """The profile of some steps on a device, from `start` to `stop`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(activities=kinds)
        self._began = 0.0

    def start(self) -> None:
        self._wait()
        self._profile.start()
        self._began = time.perf_counter()

    def stop(self, steps: int) -> dict[str, float]:
        """Return milliseconds per step, by part: of kernels on a GPU, of operators on a CPU."""
        self._wait()
        seconds = time.perf_counter() - self._began
        self._profile.stop()
        wanted = DeviceType.CUDA if self.device.type == "cuda" else DeviceType.CPU
        events = [each for each in self._profile.events() or () if each.device_type == wanted]
        return {part: round(1e3 * took / steps, 3) for part, took in by_part(events, seconds).items()}

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def by_part(events: Iterable[Any], seconds: float) -> dict[str, float]:
    """Return seconds by part, and as gaps the rest of the time, in which none of the events ran.

    Args:
        events: of the profiler, for one kind of device; ranges that a program names itself are skipped.
    """
    found = dict.fromkeys([*PARTS, ELSEWHERE], 0.0)
    spans = []
    for event in events:
        if event.is_user_annotation or event.name.startswith("ProfilerStep"):
            continue
        is_kernel = event.device_type == DeviceType.CUDA
        own = event.time_range.elapsed_us() if is_kernel else event.self_cpu_time_total
        found[part_of(event.name)] += own / 1e6
        spans.append((event.time_range.start, event.time_range.end))
    return {**found, GAPS: max(0.0, seconds - covered(spans) / 1e6)}


def part_of(name: str) -> str:
    """Return the part of a step that a kernel or an operator belongs to, by its name."""
    return next((part for part, pattern in PARTS.items() if re.search(pattern, name, re.IGNORECASE)), ELSEWHERE)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans, because kernels of two streams overlap, and operators are nested."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


class Parts(Callback):
    """Callback that writes `parts_<rank>.json`: milliseconds per step, by part.

    Args:
        folder: where to write.
        warm_up_steps: optimizer steps before those that are profiled.
        steps: optimizer steps that are profiled.
    """

    def __init__(self, folder: str, warm_up_steps: int, steps: int) -> None:
        self.folder, self.warm_up_steps, self.steps = Path(folder), warm_up_steps, steps
        self._profile: Profile | None = None
        self._step = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:  # a micro-batch that is not the last of its step
            return
        self._step = trainer.global_step
        if self._step == self.warm_up_steps:
            self._profile = Profile(trainer.strategy.root_device)
            self._profile.start()
        elif self._profile is not None and self._step == self.warm_up_steps + self.steps:
            found = self._profile.stop(self.steps)
            (self.folder / f"parts_{trainer.global_rank}.json").write_text(json.dumps(found))
            self._profile = None
