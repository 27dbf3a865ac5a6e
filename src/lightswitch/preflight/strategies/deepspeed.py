"""Limits of DeepSpeed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from lightswitch.batches.plan import BatchPlan
from lightswitch.deepspeed import config as zero_config
from lightswitch.deepspeed import ops
from lightswitch.errors import BatchError
from lightswitch.preflight import devices
from lightswitch.preflight.strategies.request import Request


def problems(request: Request) -> Iterator[str]:
    """Yield why DeepSpeed can't take the run, a line each."""
    if importlib.util.find_spec("deepspeed") is None:
        yield "strategy=deepspeed… needs deepspeed, which is not installed; type DS_BUILD_OPS=0 pip install deepspeed"
        return
    named = devices.indices(request.trainer["devices"])
    if named is not None and named != list(range(len(named))):  # it takes LOCAL_RANK for the GPU's number (0.19)
        visible = ",".join(map(str, named))
        yield (
            f"trainer.devices={request.trainer['devices']}: DeepSpeed takes the first GPUs that it sees; "
            f"export CUDA_VISIBLE_DEVICES={visible}, and use trainer.devices={len(named)}"
        )
    if isinstance(plugin := request.trainer.get("precision"), dict):
        name = str(plugin.get("_target_")).rpartition(".")[2]
        yield f"precision {name} is a plugin, and DeepSpeed casts by its own config; use strategy=ddp or strategy=fsdp"
    if request.precision in ("64", "64-true"):
        yield "precision=64-true is not for DeepSpeed; use strategy=ddp, or another precision"
    if request.precision == "16-true" and not request.on_gpu:
        yield "precision=16-true is for GPUs under DeepSpeed; use bf16-true on the CPU"
    if request.trainer.get("gradient_clip_algorithm") == "value":
        yield "DeepSpeed clips gradients by norm alone; use trainer.gradient_clip_algorithm=norm, or strategy=ddp"
    if request.strategy.get("config") is not None:
        yield from _deepspeed_file(request)
    yield from _compiled(request)
    if "nvme" in str(request.strategy) and request.trainer.get("enable_checkpointing", True):
        yield (
            "DeepSpeed's state on NVMe can't be brought into a checkpoint yet; use deepspeed_stage_3_offload, or also "
            "type ~callbacks.best_checkpoint ~callbacks.last_checkpoint trainer.enable_checkpointing=false"
        )


def _deepspeed_file(request: Request) -> Iterator[str]:
    config = request.strategy["config"]
    kept = {"_target_", "config", "logging_level", "process_group_backend", "timeout"}
    for key in request.strategy.keys() - kept:
        yield f"trainer.strategy.{key} is ignored beside trainer.strategy.config; leave one of them out"
    try:
        found = config if isinstance(config, dict) else zero_config.read(config)
    except (OSError, ValueError) as error:
        yield f"trainer.strategy.config={config} can't be read: {error}"
        return
    try:
        plan = BatchPlan.derive(*request.batch, request.world_size)
    except BatchError:  # reported by the check of the batch
        run = None
    else:
        clip_norm = float(request.trainer.get("gradient_clip_val") or 0)
        run = zero_config.Run(request.precision, plan.micro_batch, plan.accumulation, plan.replicas, clip_norm)
    for problem in zero_config.problems(found, run):
        yield f"trainer.strategy.config: {problem}"


def _compiled(request: Request) -> Iterator[str]:
    """Yield what the run can't do before an operator of DeepSpeed's is compiled."""
    options, optimizer = request.strategy, str((request.model.get("optimizer") or {}).get("_target_"))
    if "nvme" in (options.get("offload_optimizer_device"), options.get("offload_params_device")):
        path = Path(options.get("nvme_path", "/local_nvme"))
        if not os.access(path, os.W_OK):
            yield f"trainer.strategy.nvme_path={path}: there is no such folder to write to; give one on an NVMe drive"
        yield from ops.problems("async_io", "offloading to NVMe")
    for name, op in (("DeepSpeedCPUAdam", "cpu_adam"), ("FusedAdam", "fused_adam")):
        if optimizer == f"deepspeed.ops.adam.{name}":
            yield from ops.problems(op, f"optimizer {name}")
