"""Initial weights: rank 0's on every rank, sent tensor by tensor, so that no device holds all of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightswitch.strategies.rank_0 import broadcast_tensor


def broadcast_weights(module: nn.Module, device: torch.device, done: set[nn.Module]) -> None:
    """Replace parameters and buffers on each rank by rank 0's, on the rank's device. Collective.

    Args:
        module: of which ranks other than 0 may hold everything on the meta device.
        done: modules that have theirs already; those inside ``module`` are added.
    """
    replaced: dict[Tensor, Tensor] = {}  # a tied parameter stays tied
    for part in [part for part in module.modules() if part not in done]:
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in replaced:
                replaced[parameter] = nn.Parameter(broadcast_tensor(parameter, device), parameter.requires_grad)
            setattr(part, name, replaced[parameter])
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, broadcast_tensor(buffer, device))
        done.add(part)


def broadcast_metric_states(module: nn.Module, device: torch.device) -> None:
    """Replace the states of metrics, which are neither parameters nor buffers, by rank 0's. Collective."""
    for part in module.modules():
        if isinstance(part, Metric):
            part._apply(lambda tensor: broadcast_tensor(tensor, device))


def left_on_meta(module: nn.Module) -> list[str]:
    """Return the names of tensors on the meta device that are plain attributes, which nothing moves to a device."""
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
