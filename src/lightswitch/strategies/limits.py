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
    method = request.strategy.get("start_method")
    if request.nodes > 1 and method in ("spawn", "fork"):
        yield (
            f"strategy ddp_{method} starts processes on one node, and trainer.num_nodes={request.nodes}; "
            "use strategy=ddp"
        )


_LIMITS: dict[str, Callable[[Request], Iterator[str]]] = {  # by the class that a strategy's file names
    "Single": _single,
    "DDPStrategy": _ddp,
}
