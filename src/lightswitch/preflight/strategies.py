"""Limits of each strategy, reported before any process starts. Importing this module does not import torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lightswitch.batches.plan import BatchPlan
from lightswitch.deepspeed import config as zero_config
from lightswitch.deepspeed.config import operator_problems
from lightswitch.errors import BatchError
from lightswitch.preflight import devices


@dataclass(frozen=True)
class Request:
    """Values of a run's config that decide whether a strategy supports the run.

    Attributes:
        strategy, model, trainer: nodes of the config, resolved.
        devices: number per node.
        accelerator: the one in use: cpu, cuda, mps or tpu.
        batch: global_batch_size and micro_batch_size, in samples.
        uneven: number of devices over all nodes, if the nodes have different numbers; else None.
    """

    strategy: dict[str, Any]  # the config node trainer.strategy
    model: dict[str, Any]  # the config node model
    trainer: dict[str, Any]  # the config node trainer
    nodes: int
    devices: int
    accelerator: str
    batch: tuple[int, int | None] = (1, None)
    uneven: int | None = None

    @property
    def world_size(self) -> int:
        """Number of devices over all nodes."""
        return self.uneven or self.nodes * self.devices

    @property
    def world(self) -> str:
        """The number of devices in words, such as `2 × 4`."""
        return str(self.uneven or f"{self.nodes} × {self.devices}")

    @property
    def on_gpu(self) -> bool:
        """Return whether the run is on CUDA GPUs, which communicate through NCCL, or on AMD GPUs through RCCL."""
        return self.accelerator == "cuda"

    @property
    def precision(self) -> str:
        """Name of the precision, as typed."""
        return str(self.trainer.get("precision"))


def problems(request: Request) -> Iterator[str]:
    """Yield the reasons why one of the engine's strategies refuses the run; nothing for a user's strategy."""
    name = str(request.strategy.get("_target_")).rpartition(".")[2]
    if name in _CHECKS and name != "Single" and request.accelerator == "mps":
        yield (
            f"strategy {name} runs on CUDA devices and on the CPU, but the run is on an Apple GPU; "
            "use strategy=single, or trainer.accelerator=cpu"
        )
    elif name in _CHECKS:
        yield from _CHECKS[name](request)


def _single(request: Request) -> Iterator[str]:
    if request.world_size > 1:
        yield f"strategy=single uses one device, but {request.world} are requested; use strategy=ddp"


def _ddp(request: Request) -> Iterator[str]:
    """Yield the reasons why DistributedDataParallel does not support the run, one line each."""
    options = request.strategy
    if options.get("static_graph") and options.get("find_unused_parameters"):
        yield "trainer.strategy.static_graph finds unused parameters itself; leave find_unused_parameters out"
    if (options.get("bucket_cap_mb") or 1) <= 0:
        yield f"trainer.strategy.bucket_cap_mb={options['bucket_cap_mb']}: use a number greater than 0, or leave it out"
    if options.get("start_method") == "spawn" and request.nodes > 1:
        yield f"strategy=ddp_spawn starts the ranks of one machine, not of {request.nodes} nodes; use strategy=ddp"
    yield from _process_group(request)


def _fsdp(request: Request) -> Iterator[str]:
    """Yield the reasons why fully_shard does not support the run, one line each."""
    options = request.strategy
    sharding, shard_size = options.get("sharding_strategy"), options.get("shard_size")
    devices = request.world_size // options.get("tensor_parallel_size", 1)
    if shard_size is not None and sharding != "HYBRID_SHARD":
        yield "trainer.strategy.shard_size is an option of HYBRID_SHARD; use strategy=fsdp_hybrid, or leave it out"
    elif sharding == "HYBRID_SHARD" and request.uneven and request.devices % (shard_size or request.uneven):
        size = "shards over the devices of a node" if shard_size is None else f"has shard_size={shard_size}"
        yield (
            f"HYBRID_SHARD {size}, but the nodes have different numbers of devices, this one {request.devices}; use "
            "strategy=fsdp, or a trainer.strategy.shard_size that divides the number of each node"
        )
    elif shard_size is not None and (shard_size < 1 or devices % shard_size):
        sizes = ", ".join(str(size) for size in range(1, devices + 1) if devices % size == 0)
        yield f"trainer.strategy.shard_size={shard_size} does not divide {devices} devices; use one of {sizes}"
    elif sharding == "HYBRID_SHARD" and devices > 1 and (shard_size or request.devices) == 1:
        yield "HYBRID_SHARD over one device of each node shards nothing; use strategy=fsdp, or strategy=ddp"
    if options.get("accumulate_gradients") == "within_replica" and sharding != "HYBRID_SHARD":
        yield "trainer.strategy.accumulate_gradients=within_replica needs HYBRID_SHARD; use unsharded, or leave it out"
    if options.get("prefetch") is not None and options["prefetch"] < 1:
        yield f"trainer.strategy.prefetch={options['prefetch']}: it counts units, so use 1 or more, or leave it out"
    asked = options.get("param_dtype")
    rounds = request.precision in ("bf16-mixed", "16-mixed")
    if asked and request.precision != "32-true" and not (rounds and asked == "float32"):
        yield (
            f"trainer.strategy.param_dtype and precision={request.precision} both set the dtype to compute in; "
            "leave one of them out"
        )
    yield from _process_group(request)


def _tensor_parallel(request: Request) -> Iterator[str]:
    """Yield the reasons why tensor parallelism does not support the run, including those of fully_shard."""
    size, plans = request.strategy["tensor_parallel_size"], request.strategy["plans"]
    if request.precision == "16-true":
        # torch's fused Adam, which computes in 32 bits, refuses parameters on two meshes: of sharded and other layers
        yield "strategy=fsdp_tp steps float16 weights in float16, which loses Adam's moments; use precision=bf16-true"
    if size < 1 or request.world_size % size:
        fit = f"use trainer.devices={max(1, size)} or a multiple of it"
        fit = f"start a multiple of {max(1, size)} processes in all" if request.uneven else fit
        yield f"trainer.strategy.tensor_parallel_size={size} does not divide {request.world} devices; {fit}"
        return
    model = str(request.model.get("_target_")).rpartition(".")[2]
    if model not in plans:
        only = f", only for {', '.join(plans)}" if plans else ""
        yield (
            f"strategy=fsdp_tp has no plan for {model}{only}; use strategy=fsdp, or "
            f"trainer.strategy.plans.{model}=FUNCTION that returns torch's parallel styles by the paths of its modules"
        )
    yield from _fsdp(request)


def _deepspeed(request: Request) -> Iterator[str]:
    """Yield the reasons why DeepSpeed does not support the run, one line each."""
    if importlib.util.find_spec("deepspeed") is None:
        yield "strategy=deepspeed… needs deepspeed, which is not installed; type DS_BUILD_OPS=0 pip install deepspeed"
        return
    named = devices.indices(request.trainer["devices"])
    if named is not None and named != list(range(len(named))):  # it uses LOCAL_RANK as the GPU's index (0.19)
        visible = ",".join(map(str, named))
        yield (
            f"trainer.devices={request.trainer['devices']}: DeepSpeed uses the first visible GPUs; "
            f"export CUDA_VISIBLE_DEVICES={visible}, and use trainer.devices={len(named)}"
        )
    if isinstance(plugin := request.trainer.get("precision"), dict):
        name = str(plugin.get("_target_")).rpartition(".")[2]
        yield f"precision {name} is a plugin, but DeepSpeed casts by its config; use strategy=ddp or strategy=fsdp"
    if request.precision in ("64", "64-true"):
        yield "precision=64-true is not for DeepSpeed; use strategy=ddp, or another precision"
    if request.precision == "16-true" and not request.on_gpu:
        yield "precision=16-true is for GPUs under DeepSpeed; use bf16-true on the CPU"
    if request.trainer.get("gradient_clip_algorithm") == "value":
        yield "DeepSpeed clips gradients only by norm; use trainer.gradient_clip_algorithm=norm, or strategy=ddp"
    if request.strategy.get("config") is not None:
        yield from _deepspeed_file(request)
    yield from _compiled(request)


def _deepspeed_file(request: Request) -> Iterator[str]:
    config = request.strategy["config"]
    kept = {"_target_", "config", "logging_level", "process_group_backend", "timeout"}
    for key in request.strategy.keys() - kept:
        yield f"trainer.strategy.{key} is ignored together with trainer.strategy.config; leave one of them out"
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
    if blocks := zero_config.blocks_on_disk(found.get("zero_optimization")):
        yield from _disk(3, {str(block.get("nvme_path")) for block in blocks})


def _compiled(request: Request) -> Iterator[str]:
    """Yield the problems of the DeepSpeed operators that the run would compile, and of its NVMe folder."""
    options, node = request.strategy, request.model.get("optimizer")
    optimizer = node.get("_target_") if isinstance(node, dict) else None  # a model may take its name
    for device, switch in _OFFLOADED.items():
        if options.get(device) == "nvme" and not options.get(switch):
            yield f"trainer.strategy.{device}=nvme has no effect alone; also type trainer.strategy.{switch}=true"
    if "nvme" in {options.get(device) for device in _OFFLOADED}:
        yield from _disk(options.get("stage", 2), {str(options.get("nvme_path", "/local_nvme"))})
    for name, op in (("DeepSpeedCPUAdam", "cpu_adam"), ("FusedAdam", "fused_adam")):
        if optimizer == f"deepspeed.ops.adam.{name}":
            yield from operator_problems(op, f"optimizer {name}")


def _disk(stage: int, folders: set[str]) -> Iterator[str]:
    """Yield the reasons why DeepSpeed can't offload to disk, into these folders."""
    if stage < 3:
        yield (
            f"DeepSpeed offloads to NVMe at stage 3 alone, but the run has stage {stage}; use "
            "strategy=deepspeed_stage_3_offload_nvme trainer.strategy.nvme_path=DIR"
        )
    for folder in folders:
        if not os.access(folder, os.W_OK):
            yield (
                f"trainer.strategy.nvme_path={folder}: there is no such writable folder; use one on a local drive of "
                "each node"
            )
    yield from operator_problems("async_io", "offloading to NVMe")


_OFFLOADED = {"offload_optimizer_device": "offload_optimizer", "offload_params_device": "offload_parameters"}


def _process_group(request: Request) -> Iterator[str]:
    """Yield the reasons why torch can't create the configured process group."""
    backend = request.strategy.get("process_group_backend")
    if backend == "nccl" and not request.on_gpu:
        yield "trainer.strategy.process_group_backend=nccl is for GPUs, and the run is on the CPU; use gloo"
    if backend == "mpi":
        from torch.distributed import is_mpi_available

        if not is_mpi_available():
            yield "trainer.strategy.process_group_backend=mpi: this torch was built without MPI; use gloo or nccl"


_CHECKS: dict[str, Callable[[Request], Iterator[str]]] = {  # by the class in a strategy's _target_
    "Single": _single,
    "DDP": _ddp,
    "FSDP": _fsdp,
    "TensorParallel": _tensor_parallel,
    "DeepSpeed": _deepspeed,
}
