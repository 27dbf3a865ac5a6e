"""Limits of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator

from lightswitch.preflight.strategies import process_group
from lightswitch.preflight.strategies.request import Request


def problems(request: Request) -> Iterator[str]:
    """Yield why DistributedDataParallel can't take the run, a line each."""
    options = request.strategy
    method = options.get("start_method")
    if request.nodes > 1 and method in ("spawn", "fork"):
        yield (
            f"strategy ddp_{method} starts processes on one node, and trainer.num_nodes={request.nodes}; "
            "use strategy=ddp"
        )
    if options.get("static_graph") and options.get("find_unused_parameters"):
        yield "trainer.strategy.static_graph finds unused parameters itself; leave find_unused_parameters out"
    if (options.get("bucket_cap_mb") or 1) <= 0:
        yield f"trainer.strategy.bucket_cap_mb={options['bucket_cap_mb']}: use a number greater than 0, or leave it out"
    yield from process_group.problems(request)
    yield from _powersgd(request)


def _powersgd(request: Request) -> Iterator[str]:
    options = request.strategy
    if options.get("comm_hook") != "powersgd":
        for name in ("matrix_approximation_rank", "start_powerSGD_iter"):
            if name in options:
                yield f"trainer.strategy.{name} is PowerSGD's; also type trainer.strategy.comm_hook=powersgd"
        return
    if options.get("matrix_approximation_rank", 1) < 1:
        yield f"trainer.strategy.matrix_approximation_rank={options['matrix_approximation_rank']}: use 1 or more"
    if options.get("start_powerSGD_iter", 2) < 2:
        yield (
            f"trainer.strategy.start_powerSGD_iter={options['start_powerSGD_iter']}: ddp rebuilds its buckets after "
            "the first step, and PowerSGD can start after that; use 2 or more"
        )
    if request.precision == "16-mixed":
        yield (
            "trainer.strategy.comm_hook=powersgd carries errors on from step to step, and the infinities of 16-mixed "
            "with them; use precision=bf16-mixed"
        )
