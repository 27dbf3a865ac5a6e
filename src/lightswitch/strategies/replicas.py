"""Equal replicas: rank 0's initial values on every rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary
from torchmetrics import Metric


def broadcast_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Return rank 0's tensor as a new one on the device. Collective.

    Args:
        tensor: has the same shape and dtype on every rank; on ranks other than 0, it may be on the meta device.
    """
    if dist.get_rank() == 0:
        value = tensor.detach().to(device).contiguous()
    else:
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    dist.broadcast(value.flatten().view(torch.uint8), src=0)  # as bytes: NCCL and gloo do not support every dtype
    return value


@torch.no_grad()
def broadcast_in_place(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors in place with rank 0's. Collective.

    Tensors of one dtype and device are sent together, in a concatenated copy.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        alike[tensor.dtype, tensor.device].append(tensor)
    for (_, device), group in alike.items():
        values = broadcast_tensor(torch.cat([tensor.flatten() for tensor in group]), device)
        for tensor, value in zip(group, torch.split(values, [tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(value.view(tensor.shape))


def broadcast_weights(modules: Iterable[nn.Module], device: torch.device, done: set[nn.Module]) -> None:
    """Replace the direct parameters and buffers of modules with rank 0's, on each rank's device. Collective.

    Args:
        modules: modules to fill, which may be on the meta device on ranks other than 0.
        done: modules to skip, because they have rank 0's values already; the filled modules are added.
    """
    replaced: dict[Tensor, Tensor] = {}  # a tied parameter stays tied
    for part in [module for module in modules if module not in done]:
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in replaced:
                replaced[parameter] = nn.Parameter(broadcast_tensor(parameter, device), parameter.requires_grad)
            setattr(part, name, replaced[parameter])
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, broadcast_tensor(buffer, device))
        done.add(part)


def broadcast_metric_states(module: nn.Module, device: torch.device) -> None:
    """Replace the states of metrics, which are neither parameters nor buffers, with rank 0's. Collective."""
    for part in module.modules():
        if isinstance(part, Metric):
            part._apply(lambda tensor: broadcast_tensor(tensor, device))


def left_on_meta(module: nn.Module) -> list[str]:
    """Return the names of plain tensor attributes on the meta device, which nothing moves to a device."""
    return [
        f"{path}.{name}".lstrip(".")
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in ("_parameters", "_buffers") and not isinstance(part, Metric)
        if any(tensor.is_meta for tensor in _tensors(value))
    ]


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        items = value.values() if isinstance(value, dict) else value
        yield from (item for item in items if isinstance(item, Tensor))


@contextmanager
def placeholders() -> Iterator[None]:
    """Context in which new modules have their parameters on the meta device, where they take no memory.

    Under `torch.device("meta")`, plain tensors and the states of metrics would be on the meta device, too, and stay
    there.
    """
    replaced = WeakIdKeyDictionary()  # a tied parameter stays tied

    def placeholder(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta or isinstance(parameter, UninitializedParameter):
            return None
        if parameter not in replaced:
            replaced[parameter] = _like(parameter, "meta")
        return cast(nn.Parameter, replaced[parameter])

    hook = register_module_parameter_registration_hook(placeholder)  # type: ignore[arg-type]  # it may return one
    try:
        yield
    finally:
        hook.remove()


def fill_with_nothing(module: nn.Module) -> None:
    """Turn placeholders into uninitialized CPU parameters, whose memory is allocated when it is first written."""
    for parameter in module.parameters():
        if parameter.is_meta:
            torch.utils.swap_tensors(parameter, _like(parameter, "cpu"))  # type: ignore[no-untyped-call]  # untyped in torch


def _like(parameter: nn.Parameter, device: str) -> nn.Parameter:
    made = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)  # attributes that models set on their parameters
    return made
