"""DeepSpeed's engine on tensors without values: it reads zeros, and what it changes in the process is undone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from torch.utils._python_dispatch import TorchDispatchMode

from lightswitch import patches
from lightswitch.planning.fake_group import World
from lightswitch.planning.fake_model import CPU

_AGREEING: dict[str, Callable[[list[int]], Any]] = {  # what asks rank 0 for its numbers, and what answers for it
    "assert_lst_len_same_as_other_ranks": lambda numbers: None,
    "get_lst_from_rank0": lambda numbers: numbers,
}
_KEPT = (  # of a process's first engine, and taken by the next one
    ("deepspeed.utils.groups", "_WORLD_GROUP"),
    ("deepspeed.runtime.torch_autocast", "TORCH_AUTOCAST_INITIALIZED"),
    ("deepspeed.runtime.torch_autocast", "TORCH_AUTOCAST_DTYPE"),
)
_WITH_32_BIT_COPIES = {"enabled": True, "bf16_master_weights_and_grads": False, "bf16_optimizer_states": False}


class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Mode in which DeepSpeed's own code reads 0 of any tensor: no overflow, and a norm that is not clipped.

    What the model itself reads is not answered. DeepSpeed's device, `cpu:0`, is replaced by `cpu`, where all other
    tensors are: copies of real tensors, too.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._local_scalar_dense.default and _asker().startswith("deepspeed."):
            return _zero(args[0].dtype)
        if kwargs.get("device") == torch.device("cpu", 0):
            kwargs["device"] = CPU
        return func(*args, **kwargs)


def _zero(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0


def _asker() -> str:
    """Return the name of the module whose function has called torch."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _module(frame).partition(".")[0] == "torch":
        frame = frame.f_back
    return _module(frame)


def _module(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", ""))


@contextmanager
def fake_zero(strategy: Strategy, world: World) -> Iterator[None]:
    """Context in which DeepSpeed's engine is one rank of a world; what it changes in this process is undone at the end.

    It does nothing for other strategies.
    """
    if not isinstance(strategy, DeepSpeedStrategy):
        yield
        return
    from lightswitch.deepspeed.quiet_import import deepspeed

    environment, accelerator = os.environ, deepspeed.accelerator.get_accelerator()
    exported = environment.copy()
    asking = import_module("deepspeed.runtime.zero.utils")
    asked = {name: getattr(asking, name) for name in _AGREEING}
    kept = [(import_module(module), name) for module, name in _KEPT]
    before = [getattr(module, name) for module, name in kept]
    os.environ["LOCAL_RANK"] = str(world.rank % world.devices_per_node)  # DeepSpeed's own way to know it
    for name, answer in _AGREEING.items():
        patches.replace(asking, name, answer)
    try:
        yield
    finally:
        strategy.release_engine()  # type: ignore[attr-defined]  # of lightswitch.deepspeed's
        for name, ask in asked.items():
            patches.replace(asking, name, ask)
        for (module, name), value in zip(kept, before, strict=True):
            patches.replace(module, name, value)
        deepspeed.accelerator.set_accelerator(accelerator)
        environment.clear()
        environment |= exported


def plan_in_bfloat16(strategy: DeepSpeedStrategy) -> None:
    """Plan DeepSpeed's float16 as bfloat16, as it has none on CPUs: weights in 16 bits, beside copies in 32."""
    config = strategy.config or {}
    config.pop("fp16", None)
    config["bf16"] = dict(_WITH_32_BIT_COPIES)


def shards_gradients(strategy: Strategy) -> bool:
    """Return whether DeepSpeed reduces gradients in each micro batch: stage 1 does in a step's last alone."""
    config = getattr(strategy, "config", None) or {}
    return isinstance(strategy, DeepSpeedStrategy) and config.get("zero_optimization", {}).get("stage", 0) > 1
