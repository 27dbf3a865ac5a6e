"""A GPT in a plain loop like nanoGPT's train.py: autocast, fused AdamW, gradient accumulation, DDP under torchrun.

With `is_sharded`, torch's fully_shard takes the place of DDP, block by block.

python -m benchmarks.plain_gpt FOLDER '{"model": {…}, "tokens": "train.bin", …}'   # the fields of Plan

It writes the file that benchmarks.measuring writes in a run of train.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.parts import Profile
from lightswitch.monitoring.throughput import peak_bytes
from project.models.gpt import GPT

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Plan:
    """Settings of a run.

    Args:
        model: arguments of GPT, without the optimizer.
        tokens: a file of token ids, raw uint16.
        began: when the process was started, in seconds since 1970.
        micro_batch: sequences per device in a micro-batch.
        accumulation: micro-batches per step.
        compiled_by: a backend of torch.compile; None for eager.
        is_sharded: by fully_shard, in place of DDP; also a single process is started by torchrun then.
        is_profiled: write `parts_<rank>.json` (benchmarks.parts) in place of the measurements.
    """

    model: dict[str, Any]
    tokens: str
    device: str
    began: float
    micro_batch: int
    accumulation: int
    warm_up_steps: int
    steps: int
    compiled_by: str | None = None
    is_sharded: bool = False
    is_profiled: bool = False


class Loss(nn.Module):
    """Module to compile and wrap: from a batch to its loss, like nanoGPT's forward."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss((ids, targets))


def main(folder: str, plan: Plan) -> None:
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(plan.device, int(os.environ.get("LOCAL_RANK", 0)) if plan.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    is_grouped = world_size > 1 or plan.is_sharded
    if is_grouped:
        dist.init_process_group()
    kind, act = ("parts", profiled) if plan.is_profiled else ("measured", measured)
    found = act(plan, device, rank, world_size)
    Path(folder, f"{kind}_{rank}.json").write_text(json.dumps(found))
    if is_grouped:
        dist.destroy_process_group()


def measured(plan: Plan, device: torch.device, rank: int, world_size: int) -> dict[str, Any]:
    steps = trained(plan, device, rank, world_size)
    next(steps)
    first_step_seconds = time.time() - plan.began
    for _ in range(plan.warm_up_steps - 1):
        next(steps)
    since = time.perf_counter()
    for _ in range(plan.steps):
        next(steps)
    step_seconds = (time.perf_counter() - since) / plan.steps
    return {
        "first_step_seconds": first_step_seconds,
        "step_seconds": step_seconds,
        "save_seconds": [],
        "peak_bytes": peak_bytes(device),
    }


def profiled(plan: Plan, device: torch.device, rank: int, world_size: int) -> dict[str, Any]:
    steps, profile = trained(plan, device, rank, world_size), Profile(device)
    for _ in range(plan.warm_up_steps):
        next(steps)
    profile.start()
    for _ in range(plan.steps):
        next(steps)
    return {**profile.stop(plan.steps)}


def trained(plan: Plan, device: torch.device, rank: int, world_size: int) -> Iterator[None]:
    """Yield after each step, and synchronise the device after the steps at which `measured` reads the clock."""
    torch.manual_seed(0)
    model = GPT(**plan.model, optimizer=torch.optim.AdamW)
    model.configure_model()
    loss: nn.Module = Loss(model).to(device)
    if plan.is_sharded:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for part in (*model.transformer.blocks, loss):
            fully_shard(part, mp_policy=policy)
    optimizer = torch.optim.AdamW(_groups(model), lr=6e-4, betas=(0.9, 0.95), fused=device.type == "cuda")
    if plan.compiled_by:
        loss = torch.compile(loss, backend=plan.compiled_by)
    if world_size > 1 and not plan.is_sharded:
        loss = DistributedDataParallel(loss, device_ids=[device.index] if device.type == "cuda" else None)
    batches = _batches(plan, device, rank)
    batch = next(batches)
    looked_at = {1, plan.warm_up_steps, plan.warm_up_steps + plan.steps}
    for step in range(1, plan.warm_up_steps + plan.steps + 1):
        for micro_step in range(plan.accumulation):
            is_last = micro_step == plan.accumulation - 1
            waits = isinstance(loss, DistributedDataParallel) and not is_last
            alone = loss.no_sync() if waits else contextlib.nullcontext()  # type: ignore[operator]  # of DDP
            with alone:
                with torch.autocast(device.type, torch.bfloat16):
                    value = loss(*batch) / plan.accumulation
                batch = next(batches)  # while the device computes
                value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step in looked_at and device.type == "cuda":
            torch.cuda.synchronize()
        yield


def _groups(model: GPT) -> list[dict[str, Any]]:
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def _batches(plan: Plan, device: torch.device, rank: int) -> Iterator[Pair]:
    tokens, context = np.memmap(plan.tokens, np.uint16, "r"), plan.model["context"]
    generator = np.random.default_rng(rank)
    while True:
        begins = generator.integers(0, len(tokens) - context, plan.micro_batch)
        windows = torch.from_numpy(np.stack([tokens[begin : begin + context + 1].astype(np.int64) for begin in begins]))
        if device.type == "cuda":
            windows = windows.pin_memory()
        on_device = windows.to(device, non_blocking=True)
        yield on_device[:, :-1], on_device[:, 1:]


if __name__ == "__main__":
    main(sys.argv[1], Plan(**json.loads(sys.argv[2])))
