"""What each strategy can't do, told in a line before a process is started. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Request:
    """What of a run decides whether its strategy can take it."""

    strategy: dict[str, Any]  # the config node trainer.strategy
    model: dict[str, Any]  # the config node model
    trainer: dict[str, Any]  # the config node trainer
    nodes: int
    devices: int  # a node
    on_gpu: bool

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices

    @property
    def precision(self) -> str:
        return str(self.trainer.get("precision"))


class Refused(Exception):
    """What a strategy can't do with a model, found when it meets it: one line."""


def problems(request: Request) -> Iterator[str]:
    """Why the strategy refuses the run; nothing for a strategy from elsewhere."""
    name = str(request.strategy.get("_target_")).rpartition(".")[2]
    if name in _LIMITS:
        yield from _LIMITS[name](request)


def _single(request: Request) -> Iterator[str]:
    if request.world_size > 1:
        yield (
            f"strategy=single is one device, and {request.nodes} × {request.devices} are asked for; use strategy=ddp"
        )


def _ddp(request: Request) -> Iterator[str]:
    options = request.strategy
    method = options.get("start_method")
    if request.nodes > 1 and method in ("spawn", "fork"):
        yield (
            f"strategy ddp_{method} starts processes on one node, and trainer.num_nodes={request.nodes}; "
            "use strategy=ddp"
        )
    if options.get("static_graph") and options.get("find_unused_parameters"):
        yield "trainer.strategy.static_graph finds unused parameters itself; leave find_unused_parameters out"
    for name in ("bucket_cap_mb", "timeout_seconds"):
        if options.get(name) is not None and options[name] <= 0:
            yield f"trainer.strategy.{name}={options[name]}: use a number greater than 0, or leave it out"
    yield from _process_group(request)
    yield from _powersgd(request)


def _process_group(request: Request) -> Iterator[str]:
    backend = request.strategy.get("process_group_backend")
    if backend == "nccl" and not request.on_gpu:
        yield "trainer.strategy.process_group_backend=nccl is for GPUs, and the run is on the CPU; use gloo"
    if backend == "mpi":
        from torch.distributed import is_mpi_available

        if not is_mpi_available():
            yield "trainer.strategy.process_group_backend=mpi: this torch was built without MPI; use gloo or nccl"


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


_LIMITS: dict[str, Callable[[Request], Iterator[str]]] = {  # by the class that a strategy's file names
    "Single": _single,
    "DDP": _ddp,
}
