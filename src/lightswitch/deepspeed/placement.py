"""The precision of a run under DeepSpeed, and how a model that was built on the CPU comes to the devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.optim import Optimizer

from lightswitch import patches
from lightswitch.checkpoints import names
from lightswitch.deepspeed.quiet_import import deepspeed
from lightswitch.errors import Refused
from lightswitch.strategies.replicas import broadcast_in_place
from lightswitch.strategies.units import is_compiled


def partition(model: nn.Module, config: Mapping[str, Any], device: torch.device) -> None:
    """Keep a part of each of rank 0's parameters on each device. Collective.

    Args:
        config: DeepSpeed's.

    Raises:
        Refused: a parameter has no elements.
    """
    _refuse_empty(model)
    _gather_whole(filter(is_compiled, model.modules()))
    _Partitioned(module=model, config_dict_or_path=config)
    model.to(device)  # buffers and metrics


def replicate(model: nn.Module, config: Mapping[str, Any], device: torch.device) -> None:
    """Broadcast rank 0's parameters to each device, in the precision that DeepSpeed's config enables. Collective."""
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        if config.get(name, {}).get("enabled"):
            _cast(model.parameters(), dtype)
    model.to(device)
    for parameter in model.parameters():
        broadcast_in_place([parameter])


def refuse_other_dtypes(model: nn.Module, kept_in: torch.dtype | None) -> None:
    """Refuse parameters that can't be flattened with the others.

    Raises:
        Refused: one is complex, or of another dtype.
    """
    for name, parameter in names.parameters(model).items():
        kept_in = kept_in or parameter.dtype
        if parameter.dtype != kept_in or parameter.is_complex():
            raise Refused(
                f"{name} is of {parameter.dtype}, and DeepSpeed keeps all parameters in one real dtype; "
                "use strategy=fsdp or ddp"
            )


def let_compiled_modules_hold_parameters() -> None:
    """Let a module that torch.compile has wrapped have its own mapping of parameters.

    It hands attributes on to the module inside. At stage 3, where DeepSpeed gives each module a mapping of its own, the
    inner one would get that of the outer one, which is empty.
    """
    attributes = OptimizedModule._opt_mod_attributes | {"_parameters"}
    patches.replace(OptimizedModule, "_opt_mod_attributes", attributes)


def _refuse_empty(model: nn.Module) -> None:
    """Refuse parameters without elements, for which DeepSpeed fails as soon as it gathers them (0.19).

    Raises:
        Refused: there is one.
    """
    for name, parameter in names.parameters(model).items():
        if parameter.numel() == 0 and not hasattr(parameter, "ds_id"):
            raise Refused(f"{name} has no elements, which stage 3 can't gather; use strategy=deepspeed_stage_2 or fsdp")


def _gather_whole(units: Iterable[nn.Module]) -> None:
    """Let each unit be gathered at once, and not module by module: its graph would break at each of their hooks."""
    for unit in units:
        deepspeed.utils.set_z3_leaf_module(unit, True)


def _cast(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Cast weights alone; buffers stay as they are."""
    for parameter in parameters:
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


class _Partitioned(deepspeed.zero.Init):  # type: ignore[misc]  # untyped
    def _zero_init_param(self, param: nn.Parameter) -> None:
        """Partition a parameter as DeepSpeed does, which fails for one that is a scalar (0.19)."""
        _cast([param], self.dtype)
        self._convert_to_deepspeed_param(param)
        broadcast_in_place([param])
        param.partition()  # type: ignore[attr-defined]  # DeepSpeed puts it there


class ZeroPrecision(DeepSpeedPrecision):
    """Precision that leaves inputs as they are where weights are in 32 bits and DeepSpeed casts each operation."""

    autocasts = False
    steps_by_hand = False  # as the module optimizes

    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Leave it to DeepSpeed's engine, which clips by the Trainer's value in each step of its own.

        Raises:
            Refused: a module that optimizes by hand clips by itself what it does not see.
        """
        if self.steps_by_hand:
            raise Refused(
                "training_step clips gradients (self.clip_gradients), which DeepSpeed keeps to itself; use "
                "strategy=ddp or fsdp"
            )

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module as it is, in 32 bits.

        Lightning would cast its buffers as well, and make complex ones real.
        """
        return super().convert_module(module) if self.precision in ("16-true", "bf16-true") else module

    def convert_input(self, data: Any) -> Any:
        return data if self.autocasts else super().convert_input(data)
