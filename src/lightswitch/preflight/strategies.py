"""What strategies, precisions, the Trainer, the compiler and modes do not support, a condition and its line at a time.

Importing it does not import torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from lightswitch.batches.plan import BatchPlan
from lightswitch.cluster.placement import Placement
from lightswitch.config import aliases
from lightswitch.deepspeed import config as zero_config
from lightswitch.errors import BatchError, nearest
from lightswitch.preflight import devices
from lightswitch.preflight.targets import as_typed, parameters

PLANS, CHECK = ("plan", "dry_run"), "check"  # modes of one process


@dataclass(frozen=True)
class Request:
    """Values of a run's config that decide whether a strategy supports the run.

    Attributes:
        strategy, model, trainer: nodes of the config, resolved.
        devices: number per node.
        accelerator: the one in use: cpu, cuda, mps or tpu.
        batch: global_batch_size and micro_batch_size, in samples.
    """

    strategy: dict[str, Any]
    model: dict[str, Any]
    trainer: dict[str, Any]
    nodes: int
    devices: int
    accelerator: str
    batch: tuple[int, int | None] = (1, None)

    @property
    def name(self) -> str:
        """The strategy's class."""
        return str(self.strategy.get("_target_")).rpartition(".")[2]

    @property
    def world_size(self) -> int:
        """Number of devices over all nodes."""
        return self.nodes * self.devices

    @property
    def world(self) -> str:
        """The number of devices in words, such as `2 × 4`."""
        return f"{self.nodes} × {self.devices}"

    @property
    def precision(self) -> str:
        """Name of the precision, as typed."""
        return str(self.trainer.get("precision"))


def problems(request: Request) -> Iterator[str]:
    """Yield the reasons why one of the engine's strategies refuses the run; nothing for a user's strategy."""
    checks = {
        "Single": (),
        "DDP": (_of_group,),
        "FSDP": (_sharded, _of_group),
        "TensorParallel": (_tensor_parallel, _sharded, _of_group),
        "DeepSpeed": (_deepspeed,),
    }.get(request.name)
    if request.name == "Single" and request.world_size > 1:
        yield f"strategy=single uses one device, but {request.world} are requested; use strategy=ddp"
    elif checks and request.accelerator == "mps":
        yield (
            f"strategy {request.name} runs on CUDA devices and on the CPU, but the run is on an Apple GPU; "
            "use strategy=single, or trainer.accelerator=cpu"
        )
    else:
        yield from (problem for check in checks or () for problem in check(request))
    if request.trainer.get("sync_batchnorm"):
        if request.name == "DeepSpeed":
            yield "trainer.sync_batchnorm=true is not supported under DeepSpeed; use strategy=ddp or fsdp"
        elif request.accelerator == "cpu" and (request.world_size > 1 or request.name not in ("Single", "auto")):
            yield "trainer.sync_batchnorm=true needs GPUs, because torch's SyncBatchNorm does; leave it out on CPUs"


def _of_group(request: Request) -> Iterator[str]:
    """Yield why torch can't create the configured processes and their group."""
    options, backend = request.strategy, request.strategy.get("process_group_backend")
    if options.get("start_method") == "spawn" and request.nodes > 1:
        yield f"strategy=ddp_spawn starts the ranks of one machine, not of {request.nodes} nodes; use strategy=ddp"
    if backend == "nccl" and request.accelerator != "cuda":
        yield "trainer.strategy.process_group_backend=nccl is for GPUs, and the run is on the CPU; use gloo"


def _sharded(request: Request) -> Iterator[str]:
    """Yield the reasons why fully_shard does not support the run."""
    options, precision = request.strategy, request.precision
    is_hybrid, shard_size = options.get("sharding_strategy") == "HYBRID_SHARD", options.get("shard_size")
    ranks = request.world_size // options.get("tensor_parallel_size", 1)
    if shard_size is not None and not is_hybrid:
        yield "trainer.strategy.shard_size is an option of HYBRID_SHARD; use strategy=fsdp_hybrid, or leave it out"
    elif shard_size is not None and (shard_size < 1 or ranks % shard_size):
        sizes = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
        yield f"trainer.strategy.shard_size={shard_size} does not divide {ranks} devices; use one of {sizes}"
    asked = options.get("param_dtype")
    if asked and precision != "32-true" and not (asked == "float32" and precision in ("bf16-mixed", "16-mixed")):
        found = f"trainer.strategy.param_dtype and precision={precision} both set the dtype to compute in"
        yield f"{found}; leave one of them out"


def _tensor_parallel(request: Request) -> Iterator[str]:
    size, plans = request.strategy["tensor_parallel_size"], request.strategy["plans"]
    model = str(request.model.get("_target_")).rpartition(".")[2]
    if request.precision == "16-true":
        # torch's fused Adam, which computes in 32 bits, refuses parameters on two meshes: of sharded and other layers
        yield "strategy=fsdp_tp steps float16 weights in float16, which loses Adam's moments; use precision=bf16-true"
    if size < 1 or request.world_size % size:
        found = f"trainer.strategy.tensor_parallel_size={size} does not divide {request.world} devices"
        yield f"{found}; use trainer.devices={max(1, size)} or a multiple of it"
    elif model not in plans:
        only = f", only for {', '.join(plans)}" if plans else ""
        yield (
            f"strategy=fsdp_tp has no plan for {model}{only}; use strategy=fsdp, or "
            f"trainer.strategy.plans.{model}=FUNCTION that returns torch's parallel styles by the paths of its modules"
        )


def _deepspeed(request: Request) -> Iterator[str]:
    if importlib.util.find_spec("deepspeed") is None:
        yield "strategy=deepspeed… needs deepspeed, which is not installed; type DS_BUILD_OPS=0 pip install deepspeed"
        return
    options, trainer, precision = request.strategy, request.trainer, request.precision
    named = devices.indices(trainer["devices"])
    if named is not None and named != list(range(len(named))):  # it uses LOCAL_RANK as the GPU's index (0.19)
        yield (
            f"trainer.devices={trainer['devices']}: DeepSpeed uses the first visible GPUs; "
            f"export CUDA_VISIBLE_DEVICES={','.join(map(str, named))}, and use trainer.devices={len(named)}"
        )
    if isinstance(plugin := trainer.get("precision"), dict):
        name = str(plugin.get("_target_")).rpartition(".")[2]
        yield f"precision {name} is a plugin, but DeepSpeed casts by its config; use strategy=ddp or strategy=fsdp"
    if precision in ("64", "64-true"):
        yield "precision=64-true is not for DeepSpeed; use strategy=ddp, or another precision"
    if precision == "16-true" and request.accelerator != "cuda":
        yield "precision=16-true is for GPUs under DeepSpeed; use bf16-true on the CPU"
    if trainer.get("gradient_clip_algorithm") == "value":
        yield "DeepSpeed clips gradients only by norm; use trainer.gradient_clip_algorithm=norm, or strategy=ddp"
    if options.get("config") is not None:
        yield from _deepspeed_file(request)
    for key in ("offload_optimizer_device", "offload_params_device"):
        if options.get(key) == "nvme":
            yield f"trainer.strategy.{key}=nvme: {zero_config.NO_DISK}; use strategy=deepspeed_stage_3_offload"


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
    yield from (f"trainer.strategy.config: {problem}" for problem in zero_config.problems(found, run))


def trainer_problems(trainer: Mapping[str, Any], typed: Set[str]) -> Iterator[str]:
    """Yield the Trainer's arguments that would not have their documented effect, and what to type instead.

    Args:
        trainer: the Trainer's node, resolved.
        typed: the keys on the command line.
    """
    for argument, source in _SET_ELSEWHERE.items():
        if trainer.get(argument) or (argument in trainer and argument != "use_distributed_sampler"):
            meant = aliases.instead(argument, str(trainer[argument]))
            yield f"trainer.{argument}={as_typed(trainer[argument])}: {source.format(meant)}"
    if isinstance(steps := trainer.get("max_steps"), int) and (steps == 0 or steps < -1):
        yield f"trainer.max_steps={steps}: use a number from 1, or -1 with trainer.max_epochs=N"
    for argument in ("val_check_interval", "check_val_every_n_epoch"):
        if type(value := trainer.get(argument)) is int and value == 0:
            yield f"trainer.{argument}=0: use a number from 1; trainer.limit_val_batches=0 disables validation"
    if "trainer.default_root_dir" in typed:
        yield "trainer.default_root_dir: a run writes to runs/NAME/RUN_ID; type name=NAME and run_id=RUN_ID instead"


_SET_ELSEWHERE = {
    "accumulate_grad_batches": "it is set by the batch: type {}",
    "callbacks": "it is set by the group callbacks: type callbacks=[default,early_stopping] or ~callbacks.throughput",
    "logger": "it is set by the group logger: type logger=[default,mlflow] or ~logger.tensorboard",
    "plugins": "it is set by the group cluster: type cluster=torchrun or another of its choices",
    "use_distributed_sampler": "the engine distributes the samples itself, in the same order for any number of "
    "devices; leave it out",
}


def precision_problems(cfg: dict[str, Any], accelerator: str) -> Iterator[str]:
    """Yield the reasons why the precision can't be used.

    Args:
        cfg: the whole config, resolved.
        accelerator: the one in use: cpu, cuda, mps or tpu.
    """
    precision, trains = cfg["trainer"].get("precision"), cfg["mode"] in ("fit", *PLANS)
    if accelerator == "cpu" and precision in (16, "16", "16-mixed"):
        yield f"precision={precision} is for GPUs, and Lightning would put bf16-mixed in its place; use that on the CPU"
    steps_in_float16 = precision == "16-true" and "DeepSpeed" not in str(cfg["trainer"].get("strategy"))
    for key, node in cfg["model"].items() if trains and steps_in_float16 else ():
        takes = parameters(str(node.get("_target_"))) if isinstance(node, dict) else {}
        eps = node.get("eps", takes["eps"].value) if {"lr", "eps"} <= takes.keys() else None
        if isinstance(eps, float) and eps < 2.0**-14:  # the step divides by √v + eps: both are 0 in float16
            path = "optimizer" if node == cfg.get("optimizer") else f"model.{key}"
            yield (
                f"precision=16-true: {node['_target_'].rpartition('.')[2]} divides by its eps, and {eps:g} is below "
                f"float16's smallest number, 6.1e-05; use {path}.eps=1e-4, or precision=bf16-true"
            )


def mode_problems(cfg: dict[str, Any], place: Placement, strategies: Collection[str]) -> Iterator[str]:
    """Yield the reasons why a run can't be planned, rehearsed or checked.

    Args:
        strategies: the names in the config folders.
    """
    mode = cfg["mode"]
    if place.is_external:
        found = f"mode={mode} runs in a single process, but {place.launcher} started several"
        counts = "check.devices=N" if mode == CHECK else "trainer.num_nodes=N trainer.devices=N"
        yield f"{found}; type python train.py mode={mode} {counts}"
    asked = cfg["check"]["strategies"] if mode == CHECK else None
    for name in asked if isinstance(asked, list) else [asked]:
        if name not in (None, "all", *strategies):
            hint = nearest(str(name), strategies)
            yield f"check.strategies: there is no strategy {name}.{hint} Use all, or a list of {', '.join(strategies)}"
    world = cfg["trainer"]["num_nodes"] * devices.count(cfg["trainer"])
    for rank in ranks(cfg["dry_run"]["rank"]) if mode == "dry_run" else ():
        if type(rank) is not int or not 0 <= rank < world:
            found = "one rank, 0" if world == 1 else f"{world} ranks; use one from 0 to {world - 1}"
            yield f"dry_run.rank={rank}: the world has {found}"


def ranks(asked: Any) -> list[Any]:
    """Return rank 0 and the configured ranks, without duplicates; `asked` is a number, a list or None."""
    found = [0, *(asked if isinstance(asked, list) else [] if asked is None else [asked])]
    return [one for index, one in enumerate(found) if one not in found[:index]]  # a list in a list has no hash


def on_its_device(cfg: dict[str, Any]) -> dict[str, Any]:
    """Return a resolved config whose Trainer uses the planned kind of device, even if this machine has none."""
    node = (cfg.get("plan") or {}).get("device") or {}
    if not str(node.get("_target_")).endswith(".Device"):
        return cfg
    return {**cfg, "trainer": {**cfg["trainer"], "accelerator": node.get("kind", "cuda")}}
