"""Limits of fully_shard, alone and with tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from lightswitch.preflight.strategies import process_group
from lightswitch.preflight.strategies.request import Request


def problems(request: Request) -> Iterator[str]:
    """Yield why fully_shard can't take the run, a line each."""
    options = request.strategy
    sharding, shard_size = options.get("sharding_strategy"), options.get("shard_size")
    devices = request.world_size // options.get("tensor_parallel_size", 1)
    if shard_size is not None and sharding != "HYBRID_SHARD":
        yield "trainer.strategy.shard_size is HYBRID_SHARD's; use strategy=fsdp_hybrid, or leave it out"
    elif shard_size is not None and (shard_size < 1 or devices % shard_size):
        sizes = ", ".join(str(size) for size in range(1, devices + 1) if devices % size == 0)
        yield f"trainer.strategy.shard_size={shard_size} does not divide {devices} devices; use one of {sizes}"
    elif sharding == "HYBRID_SHARD" and devices > 1 and (shard_size or request.devices) == 1:
        yield "HYBRID_SHARD over one device of each node shards nothing; use strategy=fsdp, or strategy=ddp"
    if options.get("accumulate_gradients") == "within_replica" and sharding != "HYBRID_SHARD":
        yield "trainer.strategy.accumulate_gradients=within_replica is HYBRID_SHARD's; use unsharded, or leave it out"
    if options.get("prefetch") is not None and options["prefetch"] < 1:
        yield f"trainer.strategy.prefetch={options['prefetch']}: it counts units, so use 1 or more, or leave it out"
    if options.get("param_dtype") and request.precision != "32-true":
        yield (
            f"trainer.strategy.param_dtype and precision={request.precision} both say what to compute in; "
            "leave one of them out"
        )
    if request.precision == "16-mixed" and request.on_gpu:
        yield "strategy=fsdp does not scale the loss as 16-mixed needs it; use precision=bf16-mixed, or strategy=ddp"
    yield from process_group.problems(request)


def tensor_parallel_problems(request: Request) -> Iterator[str]:
    """Yield why tensor parallelism can't take the run, a line each; also what fully_shard refuses."""
    size, plans = request.strategy["tensor_parallel_size"], request.strategy["plans"]
    if request.precision == "16-true":
        # torch's fused Adam, which computes in 32 bits, takes no parameters of two meshes, as cut and uncut layers are
        yield "strategy=fsdp_tp steps float16 weights in float16, which loses Adam's moments; use precision=bf16-true"
    if size < 1 or request.world_size % size:
        yield (
            f"trainer.strategy.tensor_parallel_size={size} does not divide {request.nodes} × {request.devices} "
            f"devices; use trainer.devices={max(1, size)} or a multiple of it"
        )
        return
    model = str(request.model.get("_target_")).rpartition(".")[2]
    if model not in plans:
        only = f", only for {', '.join(plans)}" if plans else ""
        yield (
            f"strategy=fsdp_tp has no plan for {model}{only}; use strategy=fsdp, or "
            f"trainer.strategy.plans.{model}=FUNCTION that returns torch's parallel styles by the paths of its modules"
        )
    yield from problems(request)
