"""Limits of FullyShardedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator

from lightswitch.preflight.strategies import process_group
from lightswitch.preflight.strategies.request import Request


def problems(request: Request) -> Iterator[str]:
    """Yield why FullyShardedDataParallel can't take the run, a line each."""
    options = request.strategy
    yield from _mesh(options.get("sharding_strategy", "FULL_SHARD"), options.get("device_mesh"), request)
    yield from _dtypes(options.get("mixed_precision") or {})
    yield from process_group.problems(request)


def _mesh(sharding: str, mesh: list[int] | None, request: Request) -> Iterator[str]:
    if "HYBRID" not in sharding:
        if mesh is not None:
            yield f"trainer.strategy.device_mesh is for HYBRID_SHARD, and sharding_strategy={sharding}; leave it out"
        return
    shape = mesh or [request.nodes, request.devices]
    if len(shape) != 2 or shape[0] * shape[1] != request.world_size:
        yield (
            f"trainer.strategy.device_mesh={shape}: [replicas, devices of each] has to make the {request.world_size} "
            "devices of the run"
        )
    elif shape[1] == 1 and shape[0] > 1:
        yield (
            f"sharding_strategy={sharding} with {shape[0]} replicas of 1 device each shards nothing; "
            "use strategy=ddp, or give trainer.strategy.device_mesh=[replicas,devices of each]"
        )


def _dtypes(mixed_precision: dict[str, str]) -> Iterator[str]:
    for key, dtype in mixed_precision.items():
        if key not in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            yield f"trainer.strategy.mixed_precision.{key}: use param_dtype, reduce_dtype or buffer_dtype"
        elif dtype not in ("float32", "bfloat16", "float16"):
            yield f"trainer.strategy.mixed_precision.{key}={dtype}: use float32, bfloat16 or float16"
