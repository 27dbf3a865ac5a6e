"""Placement of a CPU-built model on the devices under DeepSpeed, and the run's precision."""

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
from lightswitch.strategies.sharded import refuse_scripted
from lightswitch.strategies.units import is_compiled


def partition(model: nn.Module, config: Mapping[str, Any], device: torch.device) -> None:
    """Shard rank 0's parameters over the devices. Collective.

    Args:
        config: DeepSpeed's config.

    Raises:
        Refused: a parameter has no elements, or belongs to a scripted module.
    """
    _refuse_empty(model)
    refuse_scripted(model)
    _gather_whole(filter(is_compiled, model.modules()))
    kept = {getattr(parameter, "nvme_swapper", None) for parameter in model.parameters()}  # of a fit before a test
    _Partitioned(module=model, config_dict_or_path=config, param_swapper=next(filter(None, kept), None))
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
    """Check that all parameters can be flattened together.

    Args:
        kept_in: the dtype that they must have; None for that of the first one.

    Raises:
        Refused: a parameter is complex, or has another dtype.
    """
    for name, parameter in names.parameters(model).items():
        kept_in = kept_in or parameter.dtype
        if parameter.dtype != kept_in or parameter.is_complex():
            raise Refused(
                f"{name} has dtype {parameter.dtype}, but DeepSpeed needs one real dtype for all parameters; use "
                "strategy=fsdp or ddp"
            )


def let_compiled_modules_hold_parameters() -> None:
    """Give a module that torch.compile wraps a separate `_parameters` mapping.

    Otherwise the wrapper passes assignments on to the inner module: at stage 3, DeepSpeed assigns a new mapping to each
    module, and the inner module would get the wrapper's, which is empty.
    """
    attributes = OptimizedModule._opt_mod_attributes | {"_parameters"}
    patches.replace(OptimizedModule, "_opt_mod_attributes", attributes)


def _refuse_empty(model: nn.Module) -> None:
    """Check that every parameter has elements: DeepSpeed fails when it gathers one without (0.19).

    Raises:
        Refused: a parameter has none.
    """
    for name, parameter in names.parameters(model).items():
        if parameter.numel() == 0 and not hasattr(parameter, "ds_id"):
            raise Refused(f"{name} has no elements, which stage 3 can't gather; use strategy=deepspeed_stage_2 or fsdp")


def _gather_whole(units: Iterable[nn.Module]) -> None:
    """Gather each unit as one, and not module by module: its compiled graph would break at the hooks of each module."""
    for unit in units:
        deepspeed.utils.set_z3_leaf_module(unit, True)


def _cast(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Cast floating-point parameters in place."""
    for parameter in parameters:
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


class _Partitioned(deepspeed.zero.Init):  # type: ignore[misc]  # the library has no types for it
    def _zero_init_param(self, param: nn.Parameter) -> None:
        """Partition a parameter as DeepSpeed does, and also a scalar, for which DeepSpeed fails (0.19)."""
        _cast([param], self.dtype)
        self._convert_to_deepspeed_param(param)
        broadcast_in_place([param])
        param.partition()  # type: ignore[attr-defined]  # DeepSpeed puts it there


class ZeroPrecision(DeepSpeedPrecision):
    """Precision plugin that does not cast inputs if DeepSpeed autocasts operations over 32-bit weights.

    The strategy sets both attributes.
    """

    autocasts = False
    steps_by_hand = False  # the module uses manual optimization

    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Do nothing: DeepSpeed's engine clips by the Trainer's value in each of its steps.

        Raises:
            Refused: a module under manual optimization clips gradients, which DeepSpeed does not expose.
        """
        if self.steps_by_hand:
            raise Refused(
                "training_step clips gradients (self.clip_gradients), but DeepSpeed does not expose gradients; use "
                "strategy=ddp or fsdp"
            )

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the module at 16-true and bf16-true; otherwise, return it unchanged, in 32 bits.

        Lightning would also cast its buffers, and make complex ones real.
        """
        return super().convert_module(module) if self.precision in ("16-true", "bf16-true") else module

    def convert_input(self, data: Any) -> Any:
        return data if self.autocasts else super().convert_input(data)
