"""Clipping a gradient whose parts lie on different devices."""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightswitch.monitoring.grad_norm import by_mesh, gradient_norm


@torch.no_grad()
def clip_by_norm(optimizer: Optimizer, max_norm: float) -> None:
    """Clip the gradients of an optimizer's parameters by their norm over all devices. Collective.

    `torch.nn.utils.clip_grad_norm_` does the same for parameters of one device mesh alone.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    total = gradient_norm(parameters)
    for of_mesh in by_mesh(parameters).values():
        clip_grads_with_norm_(of_mesh, max_norm, total)


@torch.no_grad()
def clip_shards_by_norm(
    parameters: Iterable[nn.Parameter],
    sharded: Container[nn.Parameter],
    max_norm: float,
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Clip gradients of which some are sharded over a process group as plain tensors. Collective.

    Args:
        parameters: all that are clipped together.
        sharded: those of which each rank of the group holds a part of the gradient; it holds others whole.
        device: where the norm is summed, in double precision where the device has it.
    """
    present = [parameter for parameter in parameters if parameter.grad is not None]
    squares = [
        get_total_norm([p.grad for p in present if p.grad is not None and (p in sharded) == is_sharded])
        .to(device, torch.float64 if device.type != "mps" else torch.float32)
        .square()
        for is_sharded in (True, False)
    ]
    dist.all_reduce(squares[0], group=group)
    clip_grads_with_norm_(present, max_norm, (squares[0] + squares[1]).sqrt())
