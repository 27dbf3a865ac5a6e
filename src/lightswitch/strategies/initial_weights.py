"""The values that training starts from: rank 0's on every rank, tensor by tensor: no device holds all of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightswitch.strategies.rank_0 import of_rank_0


def hand_out(module: nn.Module, device: torch.device, done: set[nn.Module]) -> None:
    """Put rank 0's parameters and buffers on each rank's device, in place of its own, which may be on meta.

    Args:
        done: modules that have theirs; those inside ``module`` are added.
    """
    handed: dict[Tensor, Tensor] = {}  # a tied parameter stays tied
    for part in [part for part in module.modules() if part not in done]:
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in handed:
                handed[parameter] = nn.Parameter(of_rank_0(parameter, device), parameter.requires_grad)
            setattr(part, name, handed[parameter])
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, of_rank_0(buffer, device))
        done.add(part)


def hand_out_metrics(module: nn.Module, device: torch.device) -> None:
    """The same for the states of metrics, which are neither parameters nor buffers."""
    for part in module.modules():
        if isinstance(part, Metric):
            part._apply(lambda tensor: of_rank_0(tensor, device))


def left_on_meta(module: nn.Module) -> list[str]:
    """Tensors that a module keeps as plain attributes, which nothing moves to a device."""
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
