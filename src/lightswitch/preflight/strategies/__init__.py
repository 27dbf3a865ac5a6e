"""Limits of each strategy, told in a line before a process is started. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lightswitch.preflight.strategies import ddp, deepspeed, fsdp, fsdp1
from lightswitch.preflight.strategies.request import Request

__all__ = ["Request", "problems"]


def problems(request: Request) -> Iterator[str]:
    """Yield why a strategy of the engine's refuses the run; nothing for one of the user's own."""
    name = str(request.strategy.get("_target_")).rpartition(".")[2]
    if name in _CHECKS and name != "Single" and request.accelerator == "mps":
        yield (
            f"strategy {name} runs on CUDA devices and on the CPU, and the run is on one of Apple's GPUs; "
            "use strategy=single, or trainer.accelerator=cpu"
        )
    elif name in _CHECKS:
        yield from _CHECKS[name](request)


def _single(request: Request) -> Iterator[str]:
    if request.world_size > 1:
        yield (
            f"strategy=single is one device, and {request.nodes} × {request.devices} are asked for; use strategy=ddp"
        )


_CHECKS: dict[str, Callable[[Request], Iterator[str]]] = {  # by the class that a strategy's file names
    "Single": _single,
    "DDP": ddp.problems,
    "FSDP1": fsdp1.problems,
    "FSDP": fsdp.problems,
    "TensorParallel": fsdp.tensor_parallel_problems,
    "DeepSpeed": deepspeed.problems,
}
